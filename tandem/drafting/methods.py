"""The table of drafting methods: a new one is a file in a folder of this package, and an entry
here."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tandem.drafting.composed.cascade import CascadeRecipe
from tandem.drafting.composed.forest import ForestRecipe
from tandem.drafting.composed.horizontal import HorizontalRecipe
from tandem.drafting.composed.phrases import PhrasesRecipe
from tandem.drafting.decoders.chains import ChainsRecipe
from tandem.drafting.decoders.model import ModelRecipe
from tandem.drafting.decoders.tree import TreeRecipe
from tandem.drafting.drafter import Recipe
from tandem.drafting.heads.eagle import EagleRecipe
from tandem.drafting.heads.hydra import HydraRecipe
from tandem.drafting.heads.medusa import MedusaRecipe
from tandem.drafting.lookups.lookup import LookupRecipe
from tandem.drafting.lookups.retrieval import RetrievalRecipe
from tandem.drafting.predicted.jacobi import JacobiRecipe
from tandem.drafting.predicted.lookahead import LookaheadRecipe
from tandem.drafting.predicted.masks import MasksRecipe

RECIPES: tuple[type[Recipe], ...] = (
    ModelRecipe,
    TreeRecipe,
    ChainsRecipe,
    ForestRecipe,
    LookupRecipe,
    RetrievalRecipe,
    CascadeRecipe,
    HorizontalRecipe,
    PhrasesRecipe,
    MedusaRecipe,
    HydraRecipe,
    EagleRecipe,
    JacobiRecipe,
    LookaheadRecipe,
    MasksRecipe,
)

# Recipes that draft chains, of which others can be made. They may contain each other.
Chain = Annotated[
    ModelRecipe | LookupRecipe | RetrievalRecipe | CascadeRecipe | HorizontalRecipe,
    Field(discriminator="method"),
]
for recipe in (CascadeRecipe, HorizontalRecipe):
    recipe.model_rebuild(_types_namespace={"Chain": Chain})

# Recipes' files, METHOD and RECIPE, the command's help and the lists of the tests take the names
# from here. docs/recipes.md repeats them; a test compares.
METHODS: dict[str, type[Recipe]] = {
    recipe.model_fields["method"].default: recipe for recipe in RECIPES
}

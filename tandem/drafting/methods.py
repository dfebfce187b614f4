"""The table of drafting methods: a new one is a file beside this one, and an entry here."""

from __future__ import annotations

from tandem.drafting.composed.cascade import CascadeRecipe
from tandem.drafting.composed.forest import ForestRecipe
from tandem.drafting.composed.horizontal import HorizontalRecipe
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
    MedusaRecipe,
    HydraRecipe,
    EagleRecipe,
    JacobiRecipe,
    LookaheadRecipe,
    MasksRecipe,
)

# Recipes' files, METHOD and RECIPE, the command's help and the lists of the tests take the names
# from here. docs/recipes.md repeats them; a test compares.
METHODS: dict[str, type[Recipe]] = {
    recipe.model_fields["method"].default: recipe for recipe in RECIPES
}

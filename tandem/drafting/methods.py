"""The table of drafting methods: a new one is a file beside this one, and an entry here."""

from __future__ import annotations

from tandem.drafting.chains import ChainsRecipe
from tandem.drafting.drafter import Recipe
from tandem.drafting.forest import ForestRecipe
from tandem.drafting.heads.eagle import EagleRecipe
from tandem.drafting.heads.hydra import HydraRecipe
from tandem.drafting.heads.medusa import MedusaRecipe
from tandem.drafting.lookup import LookupRecipe
from tandem.drafting.model import ModelRecipe
from tandem.drafting.retrieval import RetrievalRecipe
from tandem.drafting.tree import TreeRecipe

RECIPES: tuple[type[Recipe], ...] = (
    ModelRecipe,
    TreeRecipe,
    ChainsRecipe,
    ForestRecipe,
    LookupRecipe,
    RetrievalRecipe,
    MedusaRecipe,
    HydraRecipe,
    EagleRecipe,
)

# Recipes' files, METHOD and RECIPE, the command's help and the lists of the tests take the names
# from here. docs/recipes.md repeats them; a test compares.
METHODS: dict[str, type[Recipe]] = {
    recipe.model_fields["method"].default: recipe for recipe in RECIPES
}

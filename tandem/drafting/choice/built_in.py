"""Recipes that need no file, by their names; their keys are settings."""

from __future__ import annotations

from pathlib import Path

from tandem.drafting.choice.recipe_file import read_recipe
from tandem.drafting.choice.settings import RecipeSettings
from tandem.drafting.drafter import Recipe, settings_of
from tandem.drafting.methods import METHODS


def recipe_of(settings: RecipeSettings) -> Recipe:
    """What the settings name.

    Raises:
        StartupError: what is wrong with its file, and where.
    """
    name = settings.recipe or settings.method
    return built_in(name, settings) if name in METHODS else read_recipe(Path(name))


def built_in(method: str, settings: RecipeSettings) -> Recipe:
    """A method by itself; of a composing one, a composition of what the settings name.

    Args:
        method: a name of the table.
        settings: with the recipe's keys.
    """
    recipe = METHODS[method]
    keys = {
        key: getattr(settings, setting.name) for key, (setting, _) in settings_of(recipe).items()
    }
    return recipe.built_in(**keys)

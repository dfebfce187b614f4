"""Recipes that need no file, by the names of their methods; keys are settings."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from tandem.drafting.choice.installed import method_named
from tandem.drafting.choice.recipe_file import read_recipe
from tandem.drafting.choice.settings import RecipeSettings
from tandem.drafting.drafter import Recipe, settings_of
from tandem.errors import StartupError


def recipe_of(settings: RecipeSettings) -> Recipe:
    """What the settings name: a method, or else a file.

    Raises:
        StartupError: what is wrong with its file, and where; or with another package's method.
    """
    name = settings.recipe or settings.method
    return read_recipe(Path(name)) if method_named(name) is None else built_in(name, settings)


def built_in(name: str, settings: RecipeSettings) -> Recipe:
    """A method by itself; of a composing one, a composition of what the settings name.

    Args:
        name: of a method, of the table or of another package.
        settings: with the values of the keys that are settings; others have their defaults.

    Raises:
        StartupError: another package's method has a key without a default, or one that does not
            take a setting's value.
    """
    method = method_named(name)
    assert method is not None
    keys = {
        key: getattr(settings, setting.name) for key, (setting, _) in settings_of(method).items()
    }
    try:
        return method.built_in(**keys)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place = ".".join(map(str, fault["loc"]))
        raise StartupError(f"the recipe {name} needs a file: {place}: {fault['msg']}") from None

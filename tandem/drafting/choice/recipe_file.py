"""A recipe's file: what drafts, as TOML."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Union

from pydantic import Field, TypeAdapter, ValidationError

from tandem.drafting.choice.installed import method_named
from tandem.drafting.drafter import Recipe
from tandem.drafting.methods import METHODS
from tandem.errors import StartupError

# A cascade of four methods.
_MOST_LEVELS = 4
_MOST_BYTES = 64 << 10


def _adapter(methods: Iterable[type[Recipe]]) -> TypeAdapter[Any]:
    """Reads a recipe of any of these."""
    each: Any = Annotated[Union[tuple(methods)], Field(discriminator="method")]  # noqa: UP007
    return TypeAdapter(each)


_BUILT_IN = _adapter(METHODS.values())


def read_recipe(path: Path) -> Recipe:
    """A recipe's file.

    Raises:
        StartupError: what is wrong, and at which place of the file.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise StartupError(f"the recipe {path} has more than {_MOST_BYTES} bytes")
        return recipe_from(tomllib.loads(text.decode()))
    except FileNotFoundError as error:
        raise StartupError(
            f"the recipe {path} is neither built in ({', '.join(METHODS)}), nor an installed"
            f" package's method, nor a file: {error.strerror}"
        ) from None
    except OSError as error:
        raise StartupError(f"cannot read the recipe {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        sentence = "nested too deep" if isinstance(error, RecursionError) else error
        raise StartupError(f"the recipe {path}: {sentence}") from None


def recipe_from(keys: Mapping[str, Any]) -> Recipe:
    """A recipe from what its file says.

    Raises:
        ValueError: the place, and what is wrong there.
        StartupError: what is wrong with another package's method.
    """
    _check_levels(keys, "", 1)
    named = keys.get("method")
    method = method_named(named) if isinstance(named, str) else None
    adapter = _BUILT_IN
    if method is not None and method not in METHODS.values():
        adapter = _adapter((*METHODS.values(), method))
    try:
        recipe: Recipe = adapter.validate_python(keys)
    except ValidationError as error:
        raise ValueError(_fault(error)) from None
    return recipe


def _check_levels(keys: Mapping[str, Any], place: str, level: int) -> None:
    if level > _MOST_LEVELS:
        raise ValueError(f"{place}: nested too deep, a recipe has at most {_MOST_LEVELS} levels")
    parts = keys.get("parts")
    named = {f"parts[{i}]": part for i, part in enumerate(parts if isinstance(parts, list) else ())}
    for name, part in {**named, "inner": keys.get("inner")}.items():
        if isinstance(part, dict):
            _check_levels(part, f"{place}.{name}".lstrip("."), level + 1)


def _fault(error: ValidationError) -> str:
    """The first, with its place as the file has it: `parts[0].acceptance`."""
    fault = error.errors(include_url=False)[0]
    place, tag = "", True
    for step in fault["loc"]:
        # At the beginning, after a list's number and after `inner` comes the method, by which a
        # union is told.
        if isinstance(step, int):
            place, tag = f"{place}[{step}]", True
        elif tag:
            tag = False
        else:
            place, tag = f"{place}.{step}".lstrip("."), step == "inner"
    kind, message = fault["type"], fault["msg"].removeprefix("Value error, ")
    if kind.startswith("union_tag"):
        place = f"{place}.method".lstrip(".")
    if kind == "union_tag_invalid":
        named = fault["ctx"]
        message = f"{named['tag']!r} is unknown here; use one of {named['expected_tags']}"
    elif kind in ("union_tag_not_found", "missing"):
        message = "is missing"
    elif kind == "extra_forbidden":
        message = "is an unknown key"
    return f"{place or 'recipe'}: {message}"

"""What a drafter is made of: a method, or several composed, each with its own keys."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_serializer,
)

from tandem.errors import StartupError
from tandem.settings import MOST_NODES

# SpecTr's tables end at 8; the draws at one place are judged one after the other.
MOST_CHAINS = 16
# Each is a model in memory.
MOST_PARTS = 4
# A composing method and its parts.
_MOST_LEVELS = 2
_MOST_BYTES = 64 << 10


def _falling(value: tuple[float, ...]) -> tuple[float, ...]:
    if list(value) != sorted(value, reverse=True) or not 0 < value[-1] <= value[0] <= 1:
        raise ValueError("must be shares in (0, 1] that fall with the sibling's rank")
    return value


Acceptance = Annotated[
    tuple[float, ...], Field(min_length=1, max_length=16), AfterValidator(_falling)
]
Nodes = Annotated[int, Field(ge=1, le=MOST_NODES)]
Chains = Annotated[int, Field(ge=1, le=MOST_CHAINS)]
Ngram = Annotated[int, Field(ge=1, le=16)]
Window = Annotated[int, Field(ge=2, le=65_536)]

# What settings and files leave out. Acceptances are those of the embedded pair.
ACCEPTANCE = (0.74, 0.08, 0.035)
NODES = 16
CHAINS = 4
NGRAM = 3
WINDOW = 4096


class Recipe(BaseModel):
    """A method's name and its keys; a file has them as TOML."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """That it scores with, one a scorer; empty is MODEL's."""
        return ()

    @property
    def nodes(self) -> int:
        """The most that it draws a round where its drafts have branches; else 0."""
        return 0


class _ModelsRecipe(Recipe):
    model: str = ""

    @field_serializer("model")
    def _name(self, model: str) -> str:
        """Without its place on this machine: what is told to callers."""
        return Path(model).name

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """One."""
        return (self.model,)


class ModelRecipe(_ModelsRecipe):
    """A chain by a small decoder."""

    method: Literal["model"] = "model"


class TreeRecipe(_ModelsRecipe):
    """A tree by a small decoder."""

    method: Literal["tree"] = "tree"
    acceptance: Acceptance = ACCEPTANCE
    max_nodes: Nodes = NODES

    @property
    def nodes(self) -> int:
        """As the key says."""
        return self.max_nodes


class ChainsRecipe(_ModelsRecipe):
    """Several chains by a small decoder."""

    method: Literal["chains"] = "chains"
    chains: Chains = CHAINS
    max_nodes: Nodes = NODES

    @property
    def nodes(self) -> int:
        """As the key says."""
        return self.max_nodes


class LookupRecipe(Recipe):
    """From the text itself."""

    method: Literal["lookup"] = "lookup"
    ngram: Ngram = NGRAM
    window: Window = WINDOW


_Part = Annotated[ModelRecipe | TreeRecipe, Field(discriminator="method")]


class ForestRecipe(Recipe):
    """Trees of several small decoders at one root."""

    method: Literal["forest"] = "forest"
    parts: Annotated[tuple[_Part, ...], Field(min_length=2, max_length=MOST_PARTS)]
    max_nodes: Nodes = NODES

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """One a part."""
        return tuple(part.model for part in self.parts)

    @property
    def nodes(self) -> int:
        """As the key says, of all parts together."""
        return self.max_nodes


AnyRecipe = ModelRecipe | TreeRecipe | ChainsRecipe | LookupRecipe | ForestRecipe
_KINDS: Any = Annotated[AnyRecipe, Field(discriminator="method")]
_ADAPTER: TypeAdapter[Any] = TypeAdapter(_KINDS)


def read_recipe(path: Path) -> AnyRecipe:
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
    except OSError as error:
        raise StartupError(f"cannot read the recipe {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        sentence = "nested too deep" if isinstance(error, RecursionError) else error
        raise StartupError(f"the recipe {path}: {sentence}") from None


def recipe_from(keys: Mapping[str, Any]) -> AnyRecipe:
    """A recipe from what its file says.

    Raises:
        ValueError: the place, and what is wrong there.
    """
    _check_levels(keys, "", 1)
    try:
        recipe: AnyRecipe = _ADAPTER.validate_python(keys)
    except ValidationError as error:
        raise ValueError(_fault(error)) from None
    return recipe


def _check_levels(keys: Mapping[str, Any], place: str, level: int) -> None:
    if level > _MOST_LEVELS:
        raise ValueError(f"{place}: nested too deep, a recipe has at most {_MOST_LEVELS} levels")
    parts = keys.get("parts")
    for i, part in enumerate(parts if isinstance(parts, list) else ()):
        if isinstance(part, dict):
            _check_levels(part, f"{place}.parts[{i}]".lstrip("."), level + 1)


def _fault(error: ValidationError) -> str:
    """The first, with its place as the file has it: `parts[0].acceptance`."""
    fault = error.errors(include_url=False)[0]
    place, tag = "", True
    for step in fault["loc"]:
        # At the beginning and behind a list's number comes the method, by which a union is told.
        if isinstance(step, int):
            place, tag = f"{place}[{step}]", True
        elif tag:
            tag = False
        else:
            place = f"{place}.{step}".lstrip(".")
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

"""What a recipe takes from the environment, TANDEM_DRAFTER_* variables, wherever it drafts."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, create_model
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from tandem.drafting.choice.installed import require_method
from tandem.drafting.drafter import settings_of
from tandem.drafting.methods import METHODS
from tandem.engine.asks import Truncation
from tandem.settings import split

M = TypeVar("M", bound=BaseModel)


def _with_methods(kind: type[M]) -> type[M]:
    """Settings with each setting that a built-in method has."""
    fields: dict[str, Any] = {}
    users: dict[str, list[str]] = {}
    for name, recipe in METHODS.items():
        for setting, field in settings_of(recipe).values():
            users.setdefault(setting.name, []).append(name)
            described = f"{', '.join(users[setting.name])}: {setting.description}"
            marks = list(field.metadata)
            if get_origin(field.annotation) is tuple:  # comma separated in the environment
                marks += [NoDecode, BeforeValidator(split)]
            kinds: Any = Annotated[field.annotation, *marks]
            fields[setting.name] = kinds, Field(field.default, description=described)
    made: type[M] = create_model(
        kind.__name__, __base__=kind, __module__=kind.__module__, __doc__=kind.__doc__, **fields
    )
    return made


@_with_methods
class RecipeSettings(BaseSettings):
    """What drafts; `_with_methods` adds the methods' own settings."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_DRAFTER_", frozen=True, extra="ignore")

    recipe: str = Field(
        "",
        description="how to draft: a TOML file, or the name of a method; empty takes METHOD",
    )
    method: Annotated[str, AfterValidator(require_method)] = Field(
        "model",
        description="name of a method, built in or of an installed package (this runs the"
        " package's code); used if RECIPE is empty. Keys of built-in methods are settings",
    )
    model: str = Field("models/drafter", description="directory or hub id of the checkpoint")
    target: str = Field(
        "",
        description="of a head: directory or hub id of the target's checkpoint, from which it takes"
        " what its own files lack",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="auto takes the dtype that was measured as fastest on a CPU, and the"
        " checkpoint's elsewhere. Every dtype is exact, but a seed gives different"
        " texts in different dtypes",
    )
    draft_mass: float = Field(
        0.999,
        ge=0.001,
        le=1,
        description="share of each distribution's probability to keep: tokens are drawn from the"
        " kept part, and only that is sent",
    )
    draft_support: int = Field(
        512, ge=0, description="the most tokens of a distribution to keep; 0 keeps all"
    )
    online: float = Field(
        0.0,
        ge=0,
        le=60,
        description="seconds of a core, in each minute, in which a trainer of low priority learns"
        " from what targets reject; new sequences are drafted with what it learnt. 0 learns nothing"
        " and keeps no text",
    )

    @property
    def truncation(self) -> Truncation:
        """Of all distributions."""
        return Truncation(self.draft_mass, self.draft_support)

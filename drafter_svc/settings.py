"""The drafter's settings, from TANDEM_DRAFTER_* variables."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from tandem.settings import MOST_NODES, ModelSettings

# SpecTr's table ends at 8; the draws at one place are judged one after the other.
MOST_CHAINS = 16


class DrafterSettings(ModelSettings):
    """Everything that can be set about a drafter."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_DRAFTER_")

    method: Literal["model", "tree", "chains", "lookup"] = Field(
        "model",
        description="model drafts a chain by a small decoder, tree a tree, chains several"
        " independent chains, lookup from the text itself",
    )
    max_nodes: int = Field(
        16, ge=1, le=MOST_NODES, description="tree, chains: most tokens of a draft"
    )
    acceptance: Annotated[tuple[float, ...], NoDecode] = Field(
        (0.74, 0.08, 0.035),
        min_length=1,
        max_length=16,
        description="tree: how likely the first, second, ... sibling is kept; the shape follows",
    )
    chains: int = Field(
        4,
        ge=1,
        le=MOST_CHAINS,
        description="chains: how many side by side; fewer where the tokens of a draft would not"
        " suffice for the depth asked for",
    )
    model: str = Field("models/drafter", description="directory or hub id of the checkpoint")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="auto is the fastest on a CPU, as measured (any dtype is exact, but a seed"
        " gives other texts in another one), and the checkpoint's elsewhere",
    )
    draft_mass: float = Field(
        0.999, ge=0.001, le=1, description="share of each distribution that is drawn from and sent"
    )
    draft_support: int = Field(
        512, ge=0, description="the most tokens of a distribution to keep; 0 keeps all"
    )
    lookup_ngram: int = Field(
        3, ge=1, le=16, description="lookup: longest run of last tokens to find again, in tokens"
    )
    lookup_window: int = Field(
        4096, ge=2, le=65_536, description="lookup: last tokens of the text that are searched"
    )

    @field_validator("acceptance", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("acceptance")
    @classmethod
    def _falling(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if list(value) != sorted(value, reverse=True) or not 0 < value[-1] <= value[0] <= 1:
            raise ValueError("must be shares in (0, 1] that fall with the sibling's rank")
        return value

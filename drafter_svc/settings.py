"""The drafter's settings, from TANDEM_DRAFTER_* variables."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from drafter_svc.recipe import (
    ACCEPTANCE,
    CHAINS,
    NGRAM,
    NODES,
    WINDOW,
    Acceptance,
    Chains,
    Ngram,
    Nodes,
    Window,
)
from tandem.settings import ModelSettings


class DrafterSettings(ModelSettings):
    """Everything that can be set about a drafter."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_DRAFTER_")

    recipe: str = Field(
        "",
        description="what drafts: a TOML file, or a built-in recipe: model, tree, chains, lookup or"
        " forest, whose keys are settings; empty takes METHOD's",
    )
    method: Literal["model", "tree", "chains", "forest", "lookup"] = Field(
        "model",
        description="short for the built-in recipe of that name: model drafts a chain by a small"
        " decoder, tree a tree, chains several independent chains, forest trees of two decoders,"
        " lookup from the text itself",
    )
    max_nodes: Nodes = Field(NODES, description="tree, chains, forest: most tokens of a draft")
    acceptance: Annotated[Acceptance, NoDecode] = Field(
        ACCEPTANCE,
        description="tree, forest: how likely the first, second, ... sibling is kept; the shape"
        " follows",
    )
    chains: Chains = Field(
        CHAINS,
        description="chains: how many side by side; fewer where the tokens of a draft would not"
        " suffice for the depth asked for",
    )
    second_model: str = Field(
        "",
        description="forest: checkpoint of the drafter that draws a chain beside MODEL's tree;"
        " empty takes MODEL twice",
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
    lookup_ngram: Ngram = Field(
        NGRAM, description="lookup: longest run of last tokens to find again, in tokens"
    )
    lookup_window: Window = Field(
        WINDOW, description="lookup: last tokens of the text that are searched"
    )

    @field_validator("acceptance", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

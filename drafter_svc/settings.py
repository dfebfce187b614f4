"""The drafter's settings, from TANDEM_DRAFTER_* variables."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from tandem.settings import ModelSettings


class DrafterSettings(ModelSettings):
    """Everything that can be set about a drafter."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_DRAFTER_")

    method: Literal["model", "lookup"] = Field(
        "model", description="model drafts by a small decoder, lookup from the text itself"
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

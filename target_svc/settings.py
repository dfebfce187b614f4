"""The target's settings, from TANDEM_TARGET_* variables."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from tandem.settings import MOST_NODES, ModelSettings


class TargetSettings(ModelSettings):
    """Everything that can be set about a target."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_TARGET_")

    model: str = Field("models/target", description="directory or hub id of the checkpoint")
    max_nodes: int = Field(
        64,
        ge=0,
        le=MOST_NODES,
        description="most tokens of a draft that is a tree; 0 accepts chains only",
    )
    max_rounds: int = Field(
        32,
        ge=1,
        le=1024,
        description="rounds without a draft that a caller may request in advance; at most as many"
        " are computed for a caller that has stopped reading",
    )

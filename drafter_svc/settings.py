"""The drafter's settings, from TANDEM_DRAFTER_* variables."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from tandem.settings import ModelSettings


class DrafterSettings(ModelSettings):
    """Everything that can be set about a drafter."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_DRAFTER_")

    model: str = Field("models/drafter", description="directory or hub id of the checkpoint")
    draft_mass: float = Field(
        0.999, ge=0.001, le=1, description="share of each distribution that is drawn from and sent"
    )
    draft_support: int = Field(
        512, ge=0, description="the most tokens of a distribution to keep; 0 keeps all"
    )

"""The drafter's settings, from TANDEM_DRAFTER_* variables."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from tandem.drafting.choice.settings import RecipeSettings
from tandem.settings import ModelSettings


class DrafterSettings(RecipeSettings, ModelSettings):
    """Everything that can be set about a drafter: the service, and its recipe."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_DRAFTER_")

    ahead: int = Field(
        0,
        ge=0,
        le=1024,
        description="drafted tokens that may be prepared at a time, behind likely outcomes of"
        " drafts that targets verify; open sequences share them. Each sequence reserves twice as"
        " many positions of the KV cache. 0 prepares none",
    )
    ahead_kib: int = Field(
        256,
        ge=1,
        le=65_536,
        description="the most KiB of prepared drafts that are sent behind a draft, the likeliest"
        " first, where an orchestrator wants to have them before it knows the outcome",
    )

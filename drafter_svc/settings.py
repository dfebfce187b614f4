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
        description="most drafted tokens to prepare at a time, after likely outcomes of the drafts"
        " that targets verify; open sequences share them. Each sequence reserves up to 2 x AHEAD"
        " further positions of the KV cache. 0 prepares none",
    )
    ahead_kib: int = Field(
        256,
        ge=1,
        le=65_536,
        description="most KiB of prepared drafts to send after a draft, the likeliest first, if an"
        " orchestrator asks for them before it knows the outcome",
    )

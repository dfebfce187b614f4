"""The drafter's settings, from TANDEM_DRAFTER_* variables."""

from __future__ import annotations

from pydantic_settings import SettingsConfigDict

from tandem.drafting.choice.settings import RecipeSettings
from tandem.settings import ModelSettings


class DrafterSettings(RecipeSettings, ModelSettings):
    """Everything that can be set about a drafter: the service, and its recipe."""

    model_config = SettingsConfigDict(env_prefix="TANDEM_DRAFTER_")

"""The drafter's settings, from TANDEM_DRAFTER_* variables."""

from __future__ import annotations

from pathlib import Path

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
        " further positions of the KV cache, and those of a draft. 0 prepares none",
    )
    ahead_kib: int = Field(
        256,
        ge=1,
        le=65_536,
        description="most KiB of prepared drafts to send after a draft, the likeliest first, if an"
        " orchestrator asks for them before it knows the outcome",
    )
    online_folder: Path | None = Field(
        None,
        description="folder of what ONLINE learns, and of the texts that it learns from; one"
        " drafter has it at a time. It holds texts of callers",
    )
    online_home: str = Field(
        "",
        description="file of texts that the drafter must not forget (JSON lines, as for tandem"
        " distill); empty has it, or a head's target, write some when it first learns",
    )
    online_mib: int = Field(
        256, ge=16, le=1 << 20, description="most MiB of texts in ONLINE_FOLDER; the oldest yield"
    )
    online_hours: float = Field(
        168.0, gt=0, description="age at which a text in ONLINE_FOLDER is removed"
    )
    online_anew: bool = Field(
        False,
        description="begin anew where ONLINE_FOLDER has what was learnt from another checkpoint;"
        " false refuses to start",
    )

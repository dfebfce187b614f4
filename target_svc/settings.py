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
        description="rounds that a caller may request in advance, without drafts or with drafts of"
        " the target's own; also the most that are computed for a caller that has stopped reading",
    )
    drafts: str = Field(
        "",
        description="recipe by which the target drafts in its own process: the name of a built-in"
        " one or a TOML file; its settings are those of a drafter (`TANDEM_DRAFTER_MODEL` and so"
        " on). Empty: the target does not draft",
    )
    feedback: str = Field(
        "none",
        pattern=r"^(none|(\d{1,4}|last)(,(\d{1,4}|last))*)$",
        description="layers whose hidden states drafters can get, such as `2,16,29,last`: 0 is the"
        " embedding, i the output of layer i, `last` what the head reads; at most four",
    )
    draft_device: str = Field("", description="device of the models of DRAFTS; empty takes DEVICE")

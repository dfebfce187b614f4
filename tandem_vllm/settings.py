"""The plugin's settings, from TANDEM_VLLM_* variables."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from tandem.peers.grpc.settings import PeerSettings


class PluginSettings(PeerSettings):
    """Everything that can be set about drafts for `vllm serve`, besides vLLM's own arguments."""

    model_config = SettingsConfigDict(frozen=True, extra="ignore", env_prefix="TANDEM_VLLM_")

    verifier: Literal["block", "token"] = Field(
        "block", description="rule that decides drafts; only with --worker-cls"
    )
    wait_seconds: float = Field(
        0.25,
        ge=0,
        description="how long vLLM's next pass waits for drafts. A text whose draft is late gets"
        " none in that pass; none is requested for it until the late one has arrived and 2 to 64"
        " further passes are over",
    )
    reserve_tokens: int = Field(
        512,
        ge=1,
        description="further tokens that a text reserves on its drafter; a text that outgrows them"
        " opens a new sequence with twice as many",
    )
    zone: str = Field(
        "", max_length=128, description="zone of vLLM; drafters in the same zone are preferred"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe log line to write"
    )
    log_format: Literal["auto", "json", "console"] = Field(
        "auto", description="auto is console on a terminal and JSON elsewhere"
    )
    trace_file: Path | None = Field(
        None, description="write spans to this file as OTLP-JSON lines, regardless of OTEL_*"
    )

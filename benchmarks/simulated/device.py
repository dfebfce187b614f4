"""A decoder whose passes take the time of a simulated device."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from tandem.inference.decoder import Decoder
from tandem.inference.feed import Feed
from tandem.inference.output import PassOutput


def variables(service: str, a_pass_ms: float, a_row_ms: float) -> dict[str, str]:
    """The environment of a service on such a device.

    Args:
        service: its name.
        a_pass_ms: fixed time of a pass.
        a_row_ms: additional time for each of its rows.
    """
    return {_variable(service): f"{a_pass_ms},{a_row_ms}"}


def simulate(service: str) -> None:
    """Make every pass of this process take a device's time: compute as usual, then sleep."""
    a_pass, a_row = (float(ms) / 1e3 for ms in os.environ[_variable(service)].split(","))
    compute = Decoder.forward

    def forward(self: Decoder, feeds: Sequence[Feed]) -> PassOutput:
        until = time.perf_counter() + a_pass + a_row * sum(feed.rows for feed in feeds)
        output = compute(self, feeds)
        # While it sleeps, the other services have the cores.
        time.sleep(max(until - time.perf_counter(), 0.0))
        return output

    Decoder.forward = forward  # type: ignore[method-assign]


def _variable(service: str) -> str:
    return f"SIMULATED_{service.upper()}_MS"

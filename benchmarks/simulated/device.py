"""A decoder whose passes take the time of a device that is not there."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from torch import Tensor

from tandem.inference.decoder import Decoder
from tandem.inference.feed import Feed

# Of a pass, and of each of its rows beside; milliseconds.
PASS_VARIABLE, ROW_VARIABLE = "SIMULATED_PASS_MS", "SIMULATED_ROW_MS"


def simulate() -> None:
    """Make every pass of this process last: computed as ever, then waited for, as for a GPU."""
    a_pass = float(os.environ[PASS_VARIABLE]) / 1e3
    a_row = float(os.environ[ROW_VARIABLE]) / 1e3
    compute = Decoder.forward

    def forward(self: Decoder, feeds: Sequence[Feed]) -> Tensor:
        until = time.perf_counter() + a_pass + a_row * sum(feed.rows for feed in feeds)
        logits = compute(self, feeds)
        # While it is asleep the other services have the cores.
        time.sleep(max(until - time.perf_counter(), 0.0))
        return logits

    Decoder.forward = forward  # type: ignore[method-assign]

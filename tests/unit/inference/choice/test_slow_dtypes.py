"""A dtype that a CPU computes only slowly is named at the start, with the measured factor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from tandem.inference.choice import speed
from tests.support.decoders import decoder_over
from tests.support.models.tiny import random_llama


class Clock:
    """Of a CPU that computes bfloat16 this many times as slowly."""

    def __init__(self, factor: float) -> None:
        self.factor, self.now = factor, 0.0

    def linear(self, rows: torch.Tensor, weight: torch.Tensor) -> None:
        self.now += self.factor if weight.dtype == torch.bfloat16 else 1.0

    def perf_counter(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("dtype", "factor", "said"),
    [
        (torch.bfloat16, 7.04, [7.0]),
        (torch.bfloat16, 1.4, []),
        (torch.float32, 7.04, []),
    ],
)
def test_it_is_one_warning(
    dtype: torch.dtype, factor: float, said: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock: Any = Clock(factor)
    model = random_llama(1).to(dtype)
    with monkeypatch.context() as patch:
        patch.setattr(speed, "_FEW_WEIGHTS", 0)
        patch.setattr(speed, "linear", clock.linear)
        patch.setattr(speed, "time", clock)
        with capture_logs() as logs:
            decoder_over(model, "tiny")
    warned = [line for line in logs if line["log_level"] == "warning"]
    assert [line["times_as_slow"] for line in warned] == said
    assert all("DTYPE=float32 is faster" in line["event"] for line in warned)

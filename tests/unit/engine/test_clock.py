"""The device's time is measured by events, and is not the time that launching its work takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tandem.engine.clock import CudaClock, HostClock, clock_of


@dataclass
class Gpu:
    """Its events happen at moments of its own, in milliseconds."""

    moments: list[float]
    waits: list[float] = field(default_factory=list)

    def event(self, enable_timing: bool) -> Event:
        assert enable_timing  # or it would have no time
        return Event(self)


@dataclass
class Event:
    gpu: Gpu
    at: float = -1.0

    def record(self, stream: Any) -> None:
        self.at = self.gpu.moments.pop(0)

    def synchronize(self) -> None:
        self.gpu.waits.append(self.at)

    def elapsed_time(self, later: Event) -> float:
        return later.at - self.at


def test_moments_are_told_from_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu([10.0, 10.5, 12.25])
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    monkeypatch.setattr("tandem.engine.clock.time.perf_counter_ns", lambda: 50_000_000)
    device = CudaClock(torch.device("cuda"))
    stamps = [device.stamp() for _ in range(3)]
    assert device.times(stamps, 0) == [47_750_000, 48_250_000, 50_000_000]
    assert gpu.waits == [12.25]  # once, for all of them
    # Where its result was waited for, it was over then.
    assert device.times(stamps, 40_000_000) == [37_750_000, 38_250_000, 40_000_000]


def test_the_host_is_its_own_clock() -> None:
    host = HostClock()
    stamps = [host.stamp() for _ in range(3)]
    assert host.times(stamps, 0) == stamps == sorted(stamps)


def test_each_device_has_its_clock() -> None:
    assert isinstance(clock_of(torch.device("cpu")), HostClock)
    assert isinstance(clock_of(torch.device("cuda:1")), CudaClock)

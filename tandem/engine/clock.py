"""When things happened: on the host, or on a device that works by itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Stamps moments in the order of the device's work."""

    def stamp(self) -> Any:
        """The moment when all that was asked of the device so far is done."""

    def times(self, stamps: Sequence[Any], ended_ns: int) -> list[int]:
        """Stamps as nanoseconds of time.perf_counter_ns(); waits for the last of them.

        Args:
            stamps: at least one.
            ended_ns: when a result after the last one was there, by the same clock; 0 where none
                was waited for.
        """


class HostClock:
    """Of a device whose work is done when it is asked for."""

    def stamp(self) -> int:
        """See `Clock`."""
        return time.perf_counter_ns()

    def times(self, stamps: Sequence[int], ended_ns: int) -> list[int]:
        """See `Clock`."""
        return list(stamps)


class CudaClock:
    """For a GPU, by events of its current stream: the times of its work, not of the launches.

    Args:
        device: whose stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stamp(self) -> torch.cuda.Event:
        """See `Clock`."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def times(self, stamps: Sequence[torch.cuda.Event], ended_ns: int) -> list[int]:
        """See `Clock`."""
        last = stamps[-1]
        last.synchronize()
        now = ended_ns or time.perf_counter_ns()
        return [now - int(event.elapsed_time(last) * 1e6) for event in stamps]


def clock_of(device: torch.device) -> Clock:
    """The one for a device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()

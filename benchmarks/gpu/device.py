"""What a device does, kernel by kernel, as torch's profiler sees it.

A profiler that was used once slows every later launch of the process, so nothing that is timed may
follow it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

_COPIES = ("Memcpy", "Memset")
# Calls of the host that are listed among the device's events.
_CALL = re.compile("cu(da)?[A-Z]|Activity Buffer")
_LONGEST_NAME = 160
# Further apart are two passes.
_LONGEST_GAP_NS = 200_000


class Event(NamedTuple):
    """A kernel or a copy; times in ns."""

    name: str
    start: int
    duration: int


@dataclass
class Work:
    """What ran on a device meanwhile; on a CPU torch's operators stand for kernels.

    Attributes:
        events: in order of their start.
    """

    events: list[Event] = field(default_factory=list)

    @property
    def kernels(self) -> int:
        """How many there were, without copies."""
        return sum(not event.name.startswith(_COPIES) for event in self.events)

    def copies(self, way: str) -> int:
        """How many went this way: "HtoD" or "DtoH"."""
        return sum(event.name.startswith(_COPIES) and way in event.name for event in self.events)

    @property
    def busy_ms(self) -> float:
        """Time in which at least one ran."""
        busy, until = 0, 0
        for event in self.events:
            end = event.start + event.duration
            busy += max(0, end - max(event.start, until))
            until = max(until, end)
        return busy / 1e6

    @property
    def gaps_ms(self) -> float:
        """Time between two of one pass."""
        gaps, until = 0, None
        for event in self.events:
            if until is not None and 0 < event.start - until < _LONGEST_GAP_NS:
                gaps += event.start - until
            until = max(until or 0, event.start + event.duration)
        return gaps / 1e6

    def by_name(self, turns: int, most: int) -> list[dict[str, Any]]:
        """Kernels and copies with their calls and microseconds a turn, the longest first."""
        own: defaultdict[str, list[int]] = defaultdict(list)
        for event in self.events:
            own[event.name].append(event.duration)
        rows = [
            {
                "name": name[:_LONGEST_NAME],
                "calls": round(len(each) / turns, 2),
                "us_each": round(sum(each) / len(each) / 1e3, 2),
                "us": round(sum(each) / turns / 1e3, 2),
            }
            for name, each in own.items()
        ]
        return sorted(rows, key=lambda row: -float(str(row["us"])))[:most]

    def a_turn(self, turns: int, most: int = 12) -> dict[str, Any]:
        """For the JSON file."""
        return {
            "device_ms": round(self.busy_ms / turns, 4),
            "gaps_ms": round(self.gaps_ms / turns, 4),
            "kernels": round(self.kernels / turns, 1),
            "to_device": round(self.copies("HtoD") / turns, 1),
            "to_host": round(self.copies("DtoH") / turns, 1),
            "by_name": self.by_name(turns, most),
        }


@contextmanager
def profiled(device: torch.device) -> Iterator[Work]:
    """Profile until the end, where the device has done all."""
    cuda = device.type == "cuda"
    work = Work()
    kind = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    if cuda:
        torch.cuda.synchronize()
    with profile(activities=[kind]) as profiler:
        yield work
        if cuda:
            torch.cuda.synchronize()
    work.events = sorted(_events(profiler, cuda), key=lambda event: event.start)


def work_of(device: torch.device, work: Callable[[], object], turns: int) -> Work:
    """What `turns` of work do."""
    with profiled(device) as found:
        for _ in range(turns):
            work()
    return found


def _events(profiler: Any, cuda: bool) -> Sequence[Event]:
    # Not `events()`: it makes an object of each, for seconds.
    found = []
    for event in profiler.profiler.kineto_results.events():
        if ("CUDA" in str(event.device_type())) != cuda or (cuda and not event.duration_ns()):
            continue
        name = event.name()
        if not cuda or name.startswith(_COPIES) or not _is_call(name):
            found.append(Event(name, event.start_ns(), event.duration_ns()))
    return found


def _is_call(name: str) -> bool:
    """Whether it is a call of the host, such as cudaLaunchKernel or Context Sync."""
    return bool(_CALL.match(name)) or "Sync" in name[:24]

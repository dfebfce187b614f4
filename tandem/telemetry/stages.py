"""Where time goes: a service's stage times, and a request's exclusive ledger."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(slots=True)
class StageTimes:
    """Stage times of one step in one service, nanoseconds of its monotonic clock.

    Attributes:
        queue_ns: from the message's arrival to the start of its forward pass.
        forward_ns: in the model.
        accept_ns: in the verifier.
        batch_size: sequences that shared the last forward pass.
    """

    queue_ns: int = 0
    forward_ns: int = 0
    accept_ns: int = 0
    batch_size: int = 1


class StageClock:
    """Attributes every nanosecond of a request's wall time to exactly one stage.

    What happens in no named stage is `own`. Stages do not nest.
    """

    def __init__(self) -> None:
        self._start_ns = self._mark_ns = time.perf_counter_ns()
        self._stage = "own"
        self._spent: dict[str, int] = {}

    def stage(self, name: str) -> Stage:
        """A context manager that attributes the time inside its block to a stage."""
        return Stage(self, name)

    def switch(self, name: str) -> str:
        """Be in a stage from now on; the stage until now."""
        now = time.perf_counter_ns()
        self._spent[self._stage] = self._spent.get(self._stage, 0) + now - self._mark_ns
        self._mark_ns = now
        left, self._stage = self._stage, name
        return left

    def elapsed_ns(self) -> int:
        """Wall time since the clock was made."""
        return time.perf_counter_ns() - self._start_ns

    def spent_ns(self, name: str) -> int:
        """Time attributed to a stage so far."""
        self.switch(self._stage)
        return self._spent.get(name, 0)


class Stage:
    """Time inside the block, for a clock. See `StageClock.stage`."""

    __slots__ = ("_clock", "_name", "_outer")

    def __init__(self, clock: StageClock, name: str) -> None:
        self._clock = clock
        self._name = name
        self._outer = name

    def __enter__(self) -> None:
        self._outer = self._clock.switch(self._name)

    def __exit__(self, *error: object) -> None:
        self._clock.switch(self._outer)

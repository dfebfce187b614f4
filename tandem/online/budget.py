"""How much a trainer may work: some seconds of each minute; it gives way to everything else."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress

_MINUTE = 60.0
_LEAST_PRIORITY = 19


class Budget:
    """Seconds of a core that may be spent in a minute, in short turns.

    Args:
        seconds: of each minute.
        spent: seconds of CPU so far.
        clock: in seconds.
        sleep: waits for some seconds.
    """

    def __init__(
        self,
        seconds: float,
        spent: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._share, self._spent, self._clock, self._sleep = seconds / _MINUTE, spent, clock, sleep
        self._began, self._at = clock(), spent()

    def wait(self) -> None:
        """Wait until what was spent since the last call is earned. Time in which nothing was to do
        earns nothing."""
        now, at = self._clock(), self._spent()
        if self._share < 1:
            missing = (at - self._at) / self._share - (now - self._began)
            if missing > 0:
                self._sleep(missing)
        self._began, self._at = self._clock(), self._spent()


def yield_to_all() -> None:
    """Have this process work only where a core has nothing else to do, as far as the system can."""
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _LEAST_PRIORITY)

"""An event loop whose time passes only while nobody has anything to do.

A wait of a minute takes no time, and a busy machine makes no wait end early: when no callback is
ready, the clock moves to the next timer. The clocks of `time` follow it while the loop is open.
The loop does not wait for threads and processes: a test that has some is marked `real_time`.
"""

from __future__ import annotations

import asyncio
import selectors
import time

import pytest


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Takes the place of an event loop in tests that have no sockets and no threads."""

    def __init__(self) -> None:
        self._seconds = time.monotonic()
        super().__init__(_Skipping(self))
        self._clocks = pytest.MonkeyPatch()
        for clock in ("monotonic", "perf_counter"):
            self._clocks.setattr(time, clock, self.time)

    def time(self) -> float:
        """Seconds, as `time.monotonic()` gives them."""
        return self._seconds

    def skip(self, seconds: float) -> None:
        """Let time pass."""
        self._seconds += seconds

    def close(self) -> None:
        """End, and give the real clocks back."""
        self._clocks.undo()
        super().close()


class _Skipping(selectors.DefaultSelector):
    """Never waits for a timer."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready; where nothing is, the time of the next timer has come."""
        ready: list[tuple[selectors.SelectorKey, int]] = super().select(0 if timeout else timeout)
        if not ready and timeout:
            self._loop.skip(timeout)
        return ready

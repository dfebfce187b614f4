"""An event loop with virtual time, which passes only when no callback is ready.

The clock then jumps to the next timer. So a wait of a minute takes no real time, and a busy machine
makes no wait end early. The clocks of `time` follow the virtual one while the loop is open. The
loop does not wait for threads and processes: tests with these are marked `real_time`.
"""

from __future__ import annotations

import asyncio
import selectors
import time

import pytest


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """The event loop of tests without sockets and threads."""

    def __init__(self) -> None:
        self._seconds = time.monotonic()
        super().__init__(_Skipping(self))
        self._clocks = pytest.MonkeyPatch()
        for clock in ("monotonic", "perf_counter"):
            self._clocks.setattr(time, clock, self.time)

    def time(self) -> float:
        """Virtual time in seconds, which `time.monotonic()` returns too."""
        return self._seconds

    def skip(self, seconds: float) -> None:
        """Let time pass."""
        self._seconds += seconds

    def close(self) -> None:
        """Close the loop, and restore the real clocks."""
        self._clocks.undo()
        super().close()


class _Skipping(selectors.DefaultSelector):
    """Never waits for a timer."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """The ready events; if there are none, jump to the next timer."""
        ready: list[tuple[selectors.SelectorKey, int]] = super().select(0 if timeout else timeout)
        if not ready and timeout:
            self._loop.skip(timeout)
        return ready

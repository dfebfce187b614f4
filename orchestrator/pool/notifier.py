"""Something has changed: whoever waits looks again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Notifier:
    """Wakes all who wait at that moment."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Have them look again."""
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)

    async def wait_for(self, look: Callable[[], T | None], seconds: float) -> T | None:
        """What a look finds, now or after a change; None where that takes too long.

        Args:
            look: finds it; may raise.
            seconds: to wait for it.
        """
        until = time.monotonic() + seconds
        while (found := look()) is None and (left := until - time.monotonic()) > 0:
            told = asyncio.get_running_loop().create_future()
            self._waiting.add(told)
            try:
                await asyncio.wait((told,), timeout=left)
            finally:
                self._waiting.discard(told)
        return found

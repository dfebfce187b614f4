"""Something has changed: those that wait look again."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Notifier:
    """Wakes all who wait at that moment."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], None] = {}  # who came first looks first

    def notify(self) -> None:
        """Have them look again."""
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)

    async def wait_for(
        self, look: Callable[[], T | None], seconds: float, again: float = math.inf
    ) -> T | None:
        """What a look finds, now or after a change; None where that takes too long.

        Args:
            look: finds it; may raise.
            seconds: to wait for it.
            again: seconds after which to look without a change that was noticed here.
        """
        until = time.monotonic() + seconds
        while (found := look()) is None and (left := until - time.monotonic()) > 0:
            told = asyncio.get_running_loop().create_future()
            self._waiting[told] = None
            try:
                await asyncio.wait((told,), timeout=min(left, again))
            finally:
                del self._waiting[told]
        return found

"""Who a text goes to: a name for fair shares, and the waits for it to read."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable

from tandem.errors import IdleTimeout
from tandem.rpc.streams.patience import Patience


class ReadingClient:
    """The client of one text.

    Attributes:
        name: whose the text is.
        unread_since: when the write began that waits for it, by time.monotonic(); infinite where
            none does.

    Args:
        name: of the client, for its share of the slots.
        idle_seconds: that a write may wait for it.
        reading_seconds: that all writes may, together.
    """

    def __init__(
        self, name: str = "", idle_seconds: float = math.inf, reading_seconds: float = math.inf
    ) -> None:
        self.name = name
        self.unread_since = math.inf
        self._idle_seconds = idle_seconds
        self._reading_seconds = self._left = reading_seconds
        self._gave_way = ""
        self._patience = Patience()

    async def take(self, write: Awaitable[None]) -> None:
        """Wait for what is written to it.

        Raises:
            IdleTimeout: it reads too slowly.
        """
        began = self.unread_since = time.monotonic()
        try:
            await self._patience.bound(write, min(self._idle_seconds, self._left))
        except TimeoutError:
            raise IdleTimeout(f"{self._why(began)}; resume after what it has") from None
        finally:
            self.unread_since = math.inf
            self._left -= time.monotonic() - began

    def _why(self, began: float) -> str:
        if self._gave_way:
            seconds = time.monotonic() - began
            return f"the client read nothing for {seconds:.1f} s, and {self._gave_way}"
        if self._left < self._idle_seconds:
            return f"the text waited {self._reading_seconds:g} s for its client in all"
        return f"the client read nothing for {self._idle_seconds:g} s"

    def give_way(self, why: str) -> None:
        """Have the write that waits now wait no longer.

        Args:
            why: ends a sentence.
        """
        self._gave_way = why
        self._patience.end()

    def hurry(self, seconds: float, why: str) -> None:
        """Allow no write to wait longer than these seconds, also the one that waits now."""
        self._idle_seconds = min(self._idle_seconds, seconds)
        waiting = self.unread_since
        if waiting == math.inf:
            return

        def end() -> None:
            if self.unread_since == waiting:
                self.give_way(why)

        left = waiting + seconds - time.monotonic()
        asyncio.get_running_loop().call_later(max(left, 0.0), end)

    def close(self) -> None:
        """The text is over."""
        self._patience.close()

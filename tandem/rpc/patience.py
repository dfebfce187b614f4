"""Bounds on waits, many at a time: one timer watches over all of them.

`asyncio.timeout` costs some microseconds a wait, and a round has eight. Here a wait is an entry
and a number; it ends up to one tick late.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable
from typing import ClassVar, TypeVar

_TICK_SECONDS = 0.025

T = TypeVar("T")


class Patience:
    """A bound on the waits of one party, one wait at a time.

    Its waits are cancelled from outside, so each has to be awaited by the task that asks.
    """

    __slots__ = ("_expired", "_task", "_until", "_watch")

    def __init__(self) -> None:
        self._until = math.inf
        self._expired = False
        self._task: asyncio.Task[object] | None = None
        self._watch = _Watch.running()

    async def bound(self, awaitable: Awaitable[T], seconds: float) -> T:
        """Wait for something, but not for longer.

        Raises:
            TimeoutError: the time is over; what was waited for is cancelled.
        """
        watch = self._watch
        task = self._task = asyncio.current_task()
        self._until = watch.loop.time() + seconds
        watch.add(self)
        try:
            return await awaitable
        except asyncio.CancelledError:
            if self._expired and task is not None and task.uncancel() == 0:
                raise TimeoutError from None
            raise
        finally:
            self._until, self._expired = math.inf, False

    def close(self) -> None:
        """Watch over nothing any more."""
        self._watch.remove(self)

    def expire(self, now: float) -> None:
        """Cancel the wait if its time is over."""
        if now >= self._until and self._task is not None and not self._expired:
            self._expired = True
            self._task.cancel()


class _Watch:
    """The one timer of an event loop; it rests while nobody waits."""

    _of: ClassVar[dict[asyncio.AbstractEventLoop, _Watch]] = {}

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._parties: set[Patience] = set()
        self._ticking = False

    @classmethod
    def running(cls) -> _Watch:
        loop = asyncio.get_running_loop()
        watch = cls._of.get(loop)
        if watch is None:
            cls._of = {other: w for other, w in cls._of.items() if not other.is_closed()}
            watch = cls._of[loop] = cls(loop)
        return watch

    def add(self, party: Patience) -> None:
        self._parties.add(party)
        if not self._ticking:
            self._ticking = True
            self.loop.call_later(_TICK_SECONDS, self._tick)

    def remove(self, party: Patience) -> None:
        self._parties.discard(party)

    def _tick(self) -> None:
        now = self.loop.time()
        for party in tuple(self._parties):
            party.expire(now)
        self._ticking = bool(self._parties)
        if self._ticking:
            self.loop.call_later(_TICK_SECONDS, self._tick)

"""Bounds on waits, many at a time: one timer watches over all of them.

`asyncio.timeout` costs some microseconds a wait, and a round has eight. Here a wait is a number
and an entry in a set; the timer wakes when the first of them may be over, and not before.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable
from typing import ClassVar, TypeVar

# The timer wakes no more often than this, so a wait may end so much late.
_TICK_SECONDS = 0.02

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
        cancels = 0 if task is None else task.cancelling()
        self._until = watch.loop.time() + seconds
        watch.add(self, self._until)
        try:
            return await awaitable
        except asyncio.CancelledError:
            if self._expired and task is not None and task.uncancel() <= cancels:
                raise TimeoutError from None
            raise
        finally:
            self._until, self._expired = math.inf, False

    def close(self) -> None:
        """Watch over nothing any more."""
        self._watch.remove(self)

    def end(self) -> None:
        """Let the time of the wait that is on be over, if there is one."""
        if self._until < math.inf:
            self.expire(self._until)

    def expire(self, now: float) -> float:
        """Cancel the wait if its time is over; until when to wait for it otherwise."""
        if now < self._until or self._task is None or self._expired:
            return self._until if not self._expired else math.inf
        self._expired = True
        self._task.cancel()
        return math.inf


class _Watch:
    """The one timer of an event loop; it rests while no call waits."""

    _of: ClassVar[dict[asyncio.AbstractEventLoop, _Watch]] = {}

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._parties: set[Patience] = set()
        self._next = math.inf
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    def running(cls) -> _Watch:
        loop = asyncio.get_running_loop()
        watch = cls._of.get(loop)
        if watch is None:
            cls._of = {other: w for other, w in cls._of.items() if not other.is_closed()}
            watch = cls._of[loop] = cls(loop)
        return watch

    def add(self, party: Patience, until: float) -> None:
        self._parties.add(party)
        if until < self._next:
            self._wake_at(until)

    def remove(self, party: Patience) -> None:
        self._parties.discard(party)

    def _wake_at(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._next = when
        self._timer = self.loop.call_at(when, self._tick)

    def _tick(self) -> None:
        now = self.loop.time()
        self._next, self._timer = math.inf, None
        first = min((party.expire(now) for party in tuple(self._parties)), default=math.inf)
        if first < math.inf:
            self._wake_at(max(first, now + _TICK_SECONDS))

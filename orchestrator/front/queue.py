"""Who begins a text now, who waits for a slot and in which order, and who is refused at once.

Slots are the targets', counted here before anything is opened: a text that would find none holds
neither a drafter's slot nor room in a cache while it finds out.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from orchestrator.pool.capacity import TargetCapacity
from tandem.errors import DeadlineExceeded, Exhausted

# The most by which a wait may exceed what was expected when the text was let in.
_PATIENCE = 4.0
# How far back the mean goes of how long texts hold their slots.
_LOOKS_BACK = 16
# Other orchestrators' texts end without a word to this one.
_LOOK_SECONDS = 0.1
# Bounds of the wait that a refused client is told, in seconds: after a shorter one it would be
# refused again, and a longer estimate is unreliable.
_SOONEST, _LATEST = 0.1, 30.0


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds on what runs and waits.

    Attributes:
        waiting: texts that may wait for a slot.
        seconds: that a text may be expected to wait; one that would wait longer is refused at once.
        of_client: texts of one client that are here; 0 for no bound but its fair share.
    """

    waiting: int
    seconds: float
    of_client: int = 0


@dataclass(eq=False, slots=True)
class _Waiting:
    """A text that waits; `deadline` by time.monotonic(), `number` in the order of arrival."""

    client: str
    tokens: int
    deadline: float
    number: int
    granted: asyncio.Future[None]


class TextQueue:
    """Gives out slots: to the client that has the fewest first, of its texts to the one whose
    deadline comes first. Lives on the event loop.

    Args:
        room: asked whenever it matters.
        limits: on what runs and waits.
        make_room: called now and then while somebody waits, to have a text end that does not use
            its slot, if there is any.
        clock: in seconds.
    """

    def __init__(
        self,
        room: Callable[[], TargetCapacity],
        limits: QueueLimits,
        make_room: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._room = room
        self._limits = limits
        self._make_room = make_room
        self._clock = clock
        self._here: Counter[str] = Counter()
        self._held: Counter[str] = Counter()
        self._running = self._tokens = 0
        self._queue: list[_Waiting] = []
        self._arrivals = 0
        self._seconds = 0.0  # that a text holds its slot, at the mean
        self._ended = 0
        self._look: asyncio.TimerHandle | None = None

    @property
    def places(self) -> int:
        """Texts that may run at once."""
        return self._room().texts

    @property
    def held(self) -> int:
        """Texts that have a slot."""
        return self._running

    @property
    def waiting(self) -> int:
        """Texts that wait."""
        return len(self._queue)

    @contextmanager
    def presence(self, client: str) -> Iterator[None]:
        """Count a client's text from when it comes, before it asks for a slot, to its end.

        Raises:
            Exhausted: the client has as many here as it may.
        """
        mine, most = self._here[client], self._limits.of_client
        if most and mine >= most:
            raise Exhausted(
                f"{mine} texts of yours are being made or wait, and a client may have {most};"
                " try again when one has ended",
                retry_seconds=self._retry(0),
            )
        self._here[client] += 1
        try:
            yield
        finally:
            self._here[client] -= 1
            if not self._here[client]:
                del self._here[client]

    def check(self, client: str, remaining: float | None) -> None:
        """Refuse a text that would not be let in, before any work is done for it.

        Args:
            client: whose it is.
            remaining: seconds until its deadline; None for none.

        Raises:
            Exhausted: with how long to wait before the next attempt.
        """
        if not self._queue and self._fits(0):
            return
        ahead = self._ahead(client)
        bound = min(self._limits.seconds, math.inf if remaining is None else remaining)
        if ahead and self._expected(ahead) > bound:
            raise self._refusal(f"{ahead} others would have theirs first")
        if len(self._queue) >= self._limits.waiting and self._greediest(client) is None:
            raise self._refusal(f"{len(self._queue)} others wait")

    @asynccontextmanager
    async def admitted(
        self, client: str, tokens: int, remaining: float | None
    ) -> AsyncIterator[None]:
        """Hold a slot, once there is one.

        Args:
            client: whose text it is.
            tokens: that it may grow to, prompt included.
            remaining: see `check`.

        Raises:
            Exhausted: it was refused, or waited for far longer than was expected.
            DeadlineExceeded: its deadline passed while it waited.
        """
        self.check(client, remaining)
        if self._queue or not self._fits(tokens):
            await self._wait(client, tokens, remaining)
        else:
            self._take(client, tokens)
        began = self._clock()
        try:
            yield
        finally:
            self._ended += 1
            took = self._clock() - began
            self._seconds += (took - self._seconds) / min(self._ended, _LOOKS_BACK)
            self._give_back(client, tokens)

    async def _wait(self, client: str, tokens: int, remaining: float | None) -> None:
        # Who gave up in this very turn of the loop makes room too.
        self._queue = [other for other in self._queue if not other.granted.done()]
        if len(self._queue) >= self._limits.waiting:
            greedy = self._greediest(client)
            if greedy is None:
                raise self._refusal("none may wait" if not self._queue else "others wait")
            self._queue.remove(greedy)
            greedy.granted.set_exception(self._refusal("clients with fewer texts came"))
        self._arrivals += 1
        left = math.inf if remaining is None else remaining
        waiting = _Waiting(
            client,
            tokens,
            self._clock() + left,
            self._arrivals,
            asyncio.get_running_loop().create_future(),
        )
        self._queue.append(waiting)
        self._admit()
        seconds = _PATIENCE * self._limits.seconds
        try:
            async with asyncio.timeout(min(left, seconds)):
                await waiting.granted
        except BaseException as error:
            self._leave(waiting)
            if not isinstance(error, TimeoutError):
                raise
            if left <= seconds:
                raise DeadlineExceeded("the deadline passed before there was a place") from None
            raise self._refusal(f"none came free in {seconds:g} s") from None

    def _leave(self, waiting: _Waiting) -> None:
        """Wait no longer. A slot may have been granted in the very moment of giving up."""
        granted = waiting.granted
        if waiting in self._queue:
            self._queue.remove(waiting)
        elif granted.done() and not granted.cancelled() and granted.exception() is None:
            self._give_back(waiting.client, waiting.tokens)

    def _take(self, client: str, tokens: int) -> None:
        self._held[client] += 1
        self._running += 1
        self._tokens += tokens

    def _give_back(self, client: str, tokens: int) -> None:
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]
        self._running -= 1
        self._tokens -= tokens
        self._admit()

    def _admit(self) -> None:
        """Grant slots as long as there are any; look again soon where texts remain."""
        self._queue = [waiting for waiting in self._queue if not waiting.granted.done()]
        while self._queue:
            first = min(self._queue, key=self._order)
            if not self._fits(first.tokens):
                break
            self._queue.remove(first)
            self._take(first.client, first.tokens)
            first.granted.set_result(None)
        if self._queue:
            self._make_room()
        if self._look is not None:
            self._look.cancel()
        loop = asyncio.get_running_loop()
        self._look = loop.call_later(_LOOK_SECONDS, self._admit) if self._queue else None

    def _order(self, waiting: _Waiting) -> tuple[int, float, int]:
        return self._held[waiting.client], waiting.deadline, waiting.number

    def _fits(self, tokens: int) -> bool:
        room = self._room()
        # A text that no target could ever hold is refused by one of them, and holds no other up.
        room_for_it = self._tokens + tokens <= room.tokens or tokens > room.longest
        return self._running < room.texts and room_for_it

    def _ahead(self, client: str) -> int:
        """How many of those who wait come before the client's next text: by its fair share."""
        theirs = Counter(waiting.client for waiting in self._queue)
        mine = self._held[client] + theirs[client]
        return theirs[client] + sum(
            min(count, max(mine + 1 - self._held[other], 0))
            for other, count in theirs.items()
            if other != client
        )

    def _greediest(self, client: str) -> _Waiting | None:
        """The text that makes room in a full queue: the last one of the client that has most,
        where that has more than this one would."""
        theirs = Counter(waiting.client for waiting in self._queue)
        if not theirs:
            return None
        greedy = max(theirs, key=lambda other: theirs[other] + self._held[other])
        mine = theirs[client] + self._held[client]
        if theirs[greedy] + self._held[greedy] <= mine + 1:
            return None
        last = [waiting for waiting in self._queue if waiting.client == greedy]
        return max(last, key=lambda waiting: (waiting.deadline, waiting.number))

    def _expected(self, ahead: int) -> float:
        """Seconds until a slot comes free after a number of others."""
        return (ahead + 1) * self._seconds / max(self._running, 1)

    def _retry(self, ahead: int) -> float:
        return min(max(self._expected(ahead), _SOONEST), _LATEST)

    def _refusal(self, why: str) -> Exhausted:
        wait = self._retry(len(self._queue))
        return Exhausted(
            f"every place is taken, and {why}; try again in {wait:.1f} s", retry_seconds=wait
        )

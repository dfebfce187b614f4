"""One address and who listens there: whether it serves, what, and how busy it is."""

from __future__ import annotations

import asyncio
import contextvars
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager, suppress
from typing import Any, Generic, TypeVar

import structlog

from tandem.errors import SequenceIdled, TandemError, Unavailable
from tandem.peers.grpc.clients import DrafterClient, TargetClient
from tandem.peers.replicas.breaker import Breaker
from tandem.rpc.status import notes_of

_log = structlog.get_logger(__name__)

# Between two looks at a replica that is away: the pause doubles from the first to the last.
_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 2.0
# How long a reply's count of other callers' sequences is believed: they come and go.
_TOLD_SECONDS = 5.0
# How long one that refused a sequence for want of room is not asked again.
_FULL_SECONDS = 1.0
# While a replica that failed texts is left alone it is asked so often who it is: another process
# that listens there by now has failed none. One that still looks for faster passes is asked as
# often, since draft sizes follow from what its passes take.
_WHO_SECONDS = 1.0

C = TypeVar("C", DrafterClient, TargetClient)


class Replica(Generic[C]):
    """A replica, followed for as long as its address is known.

    Its health is watched on the connection that texts go over. A connection that breaks ends the
    watch, and the process at the next one is asked what it serves. One that has failed a
    text is asked again too, and has to pass a trial: its health may say nothing of its engine. One
    that is still improving is asked until it is not.

    Attributes:
        client: its channel.
        reply: what it serves, as it said last; None before it has.
        serving: it said so on this connection, and takes texts.
        leaving: its name has it no more; open texts go on.
        active: texts that it serves for us.
        begun_at: when it was given its last one, by time.monotonic().
        answered_at: when it last said what it serves, and passed a trial where one was due.
        obstacle: why it does not serve; None where it does, or has never been asked.
        asked: set when it has been asked once, whatever came of it, or never will be.
        idle: set while it serves no text for us.

    Args:
        client: made for it.
        changed: called whenever one of these may be another.
        seconds: that an answer may take.
    """

    def __init__(self, client: C, changed: Callable[[], None], seconds: float) -> None:
        self.client: C = client
        self.reply: Any = None
        self.serving = False
        self.leaving = False
        self.active = 0
        self.begun_at = -math.inf
        self.answered_at = -math.inf
        self.obstacle: TandemError | None = None
        self.asked = asyncio.Event()
        self.idle = asyncio.Event()
        self.idle.set()
        self._changed = changed
        self._seconds = seconds
        self._breaker = Breaker()
        self._others = 0
        self._told_at = self._full_at = -math.inf
        self._checking = False
        self._task: asyncio.Task[None] | None = None
        self._asking = asyncio.Lock()  # so that the latest answer is the last one
        self._improvement: asyncio.Task[None] | None = None
        # Its log lines are its own, not those of a text that has it asked again.
        self._context = contextvars.copy_context()

    def follow(self) -> None:
        """Begin to follow it."""
        self._checking = True
        self._task = asyncio.create_task(self._follow(), context=self._context)

    async def _follow(self) -> None:
        pause = _FIRST_PAUSE
        while True:
            try:
                async with aclosing(self.client.health(self._seconds)) as health:
                    async for serving in health:
                        if serving:
                            await self._ask()
                            pause = _FIRST_PAUSE
                        self._note(serving, None)
                        if serving:
                            self._follow_improvement()
                self._note(False, Unavailable(f"the {self.client.role} is stopping"))
            except TandemError as error:
                self._note(False, error)
            # Not all orchestrators at once, when a replica is back.
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _ask(self) -> None:
        """Ask what it serves, and whether it does, if there is a doubt."""
        client: Any = self.client
        await self._ask_who()
        while self._breaker.is_open:
            if hold := self._breaker.hold_seconds:
                await asyncio.sleep(min(hold, _WHO_SECONDS))
                await self._ask_who()
                continue
            await client.trial(self.reply, self._seconds)
            self._breaker.close()
        self.answered_at = time.monotonic()

    async def _ask_who(self) -> None:
        async with self._asking:
            reply = await self.client.model_info(self._seconds)
            if self.reply is None or reply.info.incarnation != self.reply.info.incarnation:
                self._breaker.forget()
            self.reply = reply

    def _follow_improvement(self) -> None:
        if self._improvement is None or self._improvement.done():
            self._improvement = asyncio.create_task(self._until_improved(), context=self._context)

    async def _until_improved(self) -> None:
        while self.serving and self.reply.info.improving:
            await asyncio.sleep(_WHO_SECONDS)
            before = self.reply.info
            with suppress(TandemError):  # if it is away, its health tells
                await self._ask_who()
            if self.reply.info != before:
                self._changed()

    def _note(self, serving: bool, obstacle: TandemError | None) -> None:
        address, role = self.client.address, self.client.role
        if self.serving and not serving:
            reason = "it said so" if obstacle is None else f"{obstacle}; {notes_of(obstacle)}"
            _log.warning("replica is away", role=role, address=address, reason=reason)
        elif serving and not self.serving:
            _log.info("replica serves", role=role, address=address, model=self.reply.info.model)
        self.serving, self.obstacle, self._checking = serving, obstacle, False
        self.asked.set()
        self._changed()

    def note_failure(self) -> None:
        """Have texts go elsewhere until it has passed a trial."""
        if self._breaker.is_open:  # others have failed with this one, and it is being asked
            return
        self._breaker.open()
        if self._task is not None and self.serving and not self._checking:
            self._task.cancel()
            self.follow()

    def note_full(self) -> None:
        """Have texts go elsewhere for a moment: it had no room for one."""
        self._full_at = time.monotonic()

    def note_load(self, open_sequences: int) -> None:
        """Learn from a reply how many sequences it has open, of all callers."""
        self._others = max(open_sequences - self.active, 0)
        self._told_at = time.monotonic()

    @property
    def shunned(self) -> bool:
        """Whether it has failed a text, and has not passed a trial since."""
        return self._breaker.is_open

    @property
    def full(self) -> bool:
        """Whether it has no room for another text, as far as we know."""
        return self.load >= 1 or time.monotonic() - self._full_at < _FULL_SECONDS

    @property
    def slots(self) -> int:
        """Sequences that it may hold for us, as far as we know; 0 before it has said."""
        if self.reply is None:
            return 0
        told = time.monotonic() - self._told_at < _TOLD_SECONDS
        return max(int(self.reply.info.max_sequences) - (self._others if told else 0), 0)

    @property
    def all_slots(self) -> int:
        """Sequences that it may hold for all callers, as it says; at least 1."""
        return 1 if self.reply is None else max(int(self.reply.info.max_sequences), 1)

    @property
    def taken(self) -> int:
        """Slots of it that are taken, as far as we know."""
        return 0 if self.reply is None else self.all_slots - self.slots + self.active

    @property
    def load(self) -> float:
        """Its share of slots that are taken: 1 has no room, as far as we know."""
        return self.taken / self.all_slots

    def rank(self, zone: str = "") -> tuple[bool, bool, bool]:
        """Those with the least of these are to serve a text of a zone, whatever their loads."""
        far = bool(zone) and self.reply.info.zone not in ("", zone)
        return self.shunned, self.load >= 1, far

    def order(self, zone: str = "") -> tuple[tuple[bool, bool, bool], float, float, float]:
        """The least of these is to serve a text of a zone."""
        # Equals take turns; those that had no text yet come in random order, which differs from
        # caller to caller.
        return self.rank(zone), self.load, self.begun_at, random.random()

    @contextmanager
    def serve(self) -> Iterator[C]:
        """Count a text while it is served."""
        self.active += 1
        self.begun_at = time.monotonic()
        self.idle.clear()
        try:
            yield self.client
        except SequenceIdled:
            raise
        except Unavailable:
            self.note_failure()
            raise
        finally:
            self.active -= 1
            if not self.active:
                self.idle.set()

    async def close(self) -> None:
        """Follow it no more, and close its channel."""
        self.serving = False
        self.asked.set()  # what it will not be asked any more is not to be waited for
        tasks = [task for task in (self._task, self._improvement) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.client.close()


def sound(replicas: Iterable[Replica[C]]) -> list[Replica[C]]:
    """Those that have room and have not failed a text."""
    return [replica for replica in replicas if not (replica.shunned or replica.full)]


def least_loaded(replicas: Iterable[Replica[C]], zone: str = "") -> Replica[C] | None:
    """The sound replica with the largest share of free slots; of equals the one whose turn it is,
    and any in the zone first. None if none is left."""
    return min(sound(replicas), key=lambda replica: replica.order(zone), default=None)

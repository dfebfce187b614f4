"""Who gets a slot and room in the KV pool, and who has to wait for it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tandem.engine.scorer import Memory
from tandem.errors import Exhausted, InvalidRequest, Unavailable

# Between two calls of `make_room` while a sequence waits, for a second at least.
_LOOK_SECONDS = 0.1
# Positions that are left free for each open sequence that may still grow, when another one opens:
# else those would need its memory at once.
HEADROOM = 64
# How long a sequence waits at least that goes before all others: running ones have to end first. If
# it gives up, no other one is admitted for `_TURN_SECONDS`, or until it has come again.
_FIRST_SECONDS, _TURN_SECONDS = 30.0, 3.0


class AdmittedSequence(Protocol):
    """A sequence that is given a part of each pool when it is admitted.

    Attributes:
        nodes: of its drafts, that need room beside its text.
        caches: its parts.
    """

    caches: list[Any]

    @property
    def nodes(self) -> int:
        """See the attributes."""


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Bounds on what is open and what waits.

    Attributes:
        max_sequences: open at once.
        max_waiting: that wait for a slot or for room.
        wait_seconds: that each of them waits at most.
        overcommit: positions that may be promised to sequences, as a multiple of those that there
            are. With more than 1, sequences may run out of room, and the youngest is given back.
    """

    max_sequences: int
    max_waiting: int
    wait_seconds: float
    overcommit: float = 1.0


@dataclass(frozen=True, slots=True)
class RoomWanted:
    """What a sequence needs of each pool; the nodes of its drafts come on top.

    Attributes:
        capacity: positions that it may grow to.
        least: positions that it can begin with, all of its prompt; None where it has to have all
            from the start, and then it is never given back.
        first: whether it goes before those that wait, and waits longer.
    """

    capacity: int
    least: int | None = None
    first: bool = False


class Admission:
    """First come, first served; memory is promised before a sequence is open. Unless more may be
    promised than there is, a sequence gets all of it at once, so that none runs out of it midway.
    Changed on the event loop, but by `reclaim` and `forget`.

    Attributes:
        opened: sequences since the start.
        promised: positions of each pool, to all that are open.
        make_room: called now and then while somebody waits, to have one sequence end that does
            not use its slot, if there is any.

    Args:
        pools: a sequence gets a part of each of them, or waits; none where it needs no memory.
        limits: on what is open and what waits.
    """

    def __init__(self, pools: Sequence[Memory], limits: AdmissionLimits) -> None:
        self.limits = limits
        self._pools = tuple(pools)
        # With what each was promised; and those of them that hold less.
        self._open: dict[AdmittedSequence, int] = {}
        self._growing: set[AdmittedSequence] = set()
        self._waiting: OrderedDict[AdmittedSequence, tuple[RoomWanted, asyncio.Future[None]]] = (
            OrderedDict()
        )
        self.opened = self.promised = 0
        self.make_room: Callable[[], None] = lambda: None
        # Released, and not reclaimed yet: room that is on its way.
        self._leaving: set[AdmittedSequence] = set()
        self._look: asyncio.TimerHandle | None = None
        self._turn = 0.0  # of one that goes first, until then
        # Why nothing is admitted any more; empty while something may be.
        self._closed = ""

    @property
    def open_sequences(self) -> int:
        """Sequences that hold a slot now."""
        return len(self._open)

    @property
    def waiting(self) -> int:
        """Sequences that wait for a slot, or for room."""
        return len(self._waiting)

    @property
    def promises(self) -> int:
        """Positions of each pool that may be promised in all; 0 where no pool bounds them."""
        return int(self._positions * self.limits.overcommit)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that would not have to wait for memory; 0 where each
        would, or nothing is held."""
        if self.limits.overcommit <= 1:
            return min([pool.longest_free for pool in self._pools if pool.positions], default=0)
        room = self._left > 0  # for a beginning
        return max(min(self.promises - self.promised, self._positions), 0) if room else 0

    @property
    def _positions(self) -> int:
        return min([pool.positions for pool in self._pools if pool.positions], default=0)

    async def admit(self, sequence: AdmittedSequence, room: RoomWanted) -> bool:
        """Give a sequence a slot and room in each pool, or wait for them.

        Returns:
            Whether it holds less than it was promised, and may be given back.

        Raises:
            InvalidRequest: it could never fit.
            Exhausted: too many wait already, or it waited for too long.
            Unavailable: the engine is stopping or has failed, or its device is gone.
        """
        if self._closed:
            raise Unavailable(self._closed)
        limits, capacity = self.limits, room.capacity + sequence.nodes
        if capacity > (self._positions or capacity):
            raise InvalidRequest(
                f"open.max_new_tokens: the sequence needs {capacity} positions of the KV cache,"
                f" which has {self._positions}"
            )
        least = capacity
        if room.least is not None and limits.overcommit > 1:
            least = min(room.least + sequence.nodes, capacity)
        room = RoomWanted(capacity, least, room.first)
        if not any(self._goes_before(room)) and self._try(sequence, room):
            return least < capacity
        if len(self._waiting) >= limits.max_waiting and not room.first:
            raise Exhausted(
                f"all {limits.max_sequences} sequences are taken or the KV cache is full, and"
                f" {len(self._waiting)} others wait; try another replica, or later"
            )
        granted = asyncio.get_running_loop().create_future()
        self._waiting[sequence] = (room, granted)
        seconds = limits.wait_seconds
        if room.first:
            self._turn = 0.0
            for other in [one for one, (its, _) in self._waiting.items() if not its.first]:
                self._waiting.move_to_end(other)
            seconds = max(seconds, _FIRST_SECONDS)
        self._look_for_room()
        try:
            async with asyncio.timeout(seconds):
                await granted
        except BaseException as error:
            # It may have been granted just as it gave up.
            if self.release(sequence):
                self.reclaim(sequence)
            if not isinstance(error, TimeoutError):
                raise
            if room.first:  # it comes again, and keeps its turn
                self._turn = asyncio.get_running_loop().time() + _TURN_SECONDS
            raise Exhausted(
                f"all {limits.max_sequences} sequences are taken or the KV cache is full, for"
                f" more than {seconds:g} s; try another replica, or later"
            ) from None
        finally:
            self._waiting.pop(sequence, None)
            # Those after a large one that gave up may fit.
            self.admit_waiting()
        return least < capacity

    def release(self, sequence: AdmittedSequence) -> bool:
        """Give the slot back; its memory stays reserved until `reclaim`. False if it had none."""
        if sequence not in self._open:
            return False
        self.promised -= self._open.pop(sequence)
        self._growing.discard(sequence)
        self._leaving.add(sequence)
        return True

    def reclaim(self, sequence: AdmittedSequence) -> None:
        """Take the memory back, when no batch uses it any more. From any thread."""
        for pool, cache in zip(self._pools, sequence.caches, strict=True):
            pool.release(cache)
        self.forget(sequence)

    def forget(self, sequence: AdmittedSequence) -> None:
        """A released sequence has no memory any more. From any thread."""
        self._leaving.discard(sequence)

    def _look_for_room(self) -> None:
        """Have room made, as long as more wait than leave."""
        if self._look is not None:
            self._look.cancel()
            self._look = None
        if not self._waiting:
            return
        next_one = next(room for room, _ in self._waiting.values())
        if len(self._leaving) < len(self._waiting) and not self._is_others_turn(next_one):
            self.make_room()
        self.admit_waiting()  # those whose turn it was not
        self._look = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look_for_room)

    def admit_waiting(self) -> None:
        """Admit those who wait, in their order, as long as they fit."""
        for sequence, (room, granted) in list(self._waiting.items()):
            if granted.done():
                continue
            if self._is_others_turn(room) or not self._try(sequence, room):
                return
            granted.set_result(None)

    def promise_no_more(self, sequences: Iterable[AdmittedSequence]) -> None:
        """These were given back, whose callers have yet to hear of it; they keep their slots."""
        for sequence in sequences:
            if sequence in self._open:
                self.promised -= self._open[sequence]
                self._open[sequence] = 0
                self._growing.discard(sequence)

    def close(self, reason: str) -> None:
        """Fail all that wait, and all that come later."""
        self._closed = reason
        for _, granted in self._waiting.values():
            if not granted.done():
                granted.set_exception(Unavailable(reason))

    def _try(self, sequence: AdmittedSequence, room: RoomWanted) -> bool:
        if len(self._open) >= self.limits.max_sequences:
            return False
        if not self._may_promise(room):
            return False
        caches: list[Any] = []
        for pool in self._pools:
            cache = pool.reserve(room.capacity, sequence.nodes, room.least)
            if cache is None:
                for other, reserved in zip(self._pools, caches, strict=False):
                    other.release(reserved)
                return False
            caches.append(cache)
        sequence.caches = caches
        promised = self._open[sequence] = room.capacity if self._positions else 0
        self.promised += promised
        if room.least is not None and room.least < room.capacity:
            self._growing.add(sequence)
        if room.first:
            self._turn = 0.0
        self.opened += 1
        return True

    def _may_promise(self, room: RoomWanted) -> bool:
        """Whether a sequence may have its promise now. Where all is held at once, the pools
        themselves bound it."""
        if self.limits.overcommit <= 1 or not self._open or not self._positions:
            return True
        if self.promised + room.capacity > self.promises:
            return False
        return room.least in (None, room.capacity) or self._left >= (room.least or 0)

    @property
    def _left(self) -> int:
        """Positions that a sequence may open with, if it is to grow."""
        free = min([pool.free_positions for pool in self._pools if pool.positions], default=0)
        return free - HEADROOM * len(self._growing)

    def _goes_before(self, room: RoomWanted) -> Iterator[bool]:
        """For each that waits, whether it comes before one that has come now."""
        yield self._is_others_turn(room)
        for its, _ in self._waiting.values():
            yield its.first or not room.first

    def _is_others_turn(self, room: RoomWanted) -> bool:
        """Whether one that goes first was refused, and is about to come again."""
        return not room.first and asyncio.get_running_loop().time() < self._turn

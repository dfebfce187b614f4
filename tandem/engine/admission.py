"""Who gets a slot and room in the KV pool, and who has to wait for it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tandem.engine.scorer import Memory
from tandem.errors import Exhausted, InvalidRequest, Unavailable

# Between two calls of `make_room` while a sequence waits, which may be for a second only.
_LOOK_SECONDS = 0.1


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
    """

    max_sequences: int
    max_waiting: int
    wait_seconds: float


class Admission:
    """First come, first served; memory is reserved in full before a sequence is open, so that
    none runs out of it midway. Lives on the event loop, but for `reclaim`.

    Attributes:
        make_room: called now and then while somebody waits, to have one sequence end that does
            not use its slot, if there is any.

    Args:
        pools: a sequence gets a part of each of them, or waits; none where it needs no memory.
        limits: on what is open and what waits.
    """

    def __init__(self, pools: Sequence[Memory], limits: AdmissionLimits) -> None:
        self.limits = limits
        self._pools = tuple(pools)
        self._open: set[AdmittedSequence] = set()
        self._waiting: OrderedDict[AdmittedSequence, tuple[int, asyncio.Future[None]]] = (
            OrderedDict()
        )
        self.opened = 0
        self.make_room: Callable[[], None] = lambda: None
        # Released, and not reclaimed yet: room that is on its way.
        self._leaving: set[AdmittedSequence] = set()
        self._look: asyncio.TimerHandle | None = None
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

    async def admit(self, sequence: AdmittedSequence, capacity: int) -> None:
        """Give a sequence a slot and `capacity` positions of each pool, or wait for them; beside
        them positions for the nodes of its drafts.

        Raises:
            InvalidRequest: it could never fit.
            Exhausted: too many wait already, or it waited for too long.
            Unavailable: the engine is stopping, or its device is gone.
        """
        if self._closed:
            raise Unavailable(self._closed)
        capacity += sequence.nodes
        holding = [pool.positions for pool in self._pools if pool.positions]
        positions = min(holding, default=capacity)
        if capacity > positions:
            raise InvalidRequest(
                f"open.max_new_tokens: the sequence needs {capacity} positions of the KV cache,"
                f" which has {positions}"
            )
        if not self._waiting and self._try(sequence, capacity):
            return
        limits = self.limits
        if len(self._waiting) >= limits.max_waiting:
            raise Exhausted(
                f"all {limits.max_sequences} sequences are taken or the KV cache is full, and"
                f" {len(self._waiting)} others wait; try another replica, or later"
            )
        granted = asyncio.get_running_loop().create_future()
        self._waiting[sequence] = (capacity, granted)
        self._look_for_room()
        try:
            async with asyncio.timeout(limits.wait_seconds):
                await granted
        except BaseException as error:
            # It may have been granted in the very moment in which it gave up.
            if self.release(sequence):
                self.reclaim(sequence)
            if not isinstance(error, TimeoutError):
                raise
            raise Exhausted(
                f"all {limits.max_sequences} sequences are taken or the KV cache is full, for"
                f" more than {limits.wait_seconds:g} s; try another replica, or later"
            ) from None
        finally:
            self._waiting.pop(sequence, None)
            # Those behind a large one that gave up may fit.
            self.admit_waiting()

    def release(self, sequence: AdmittedSequence) -> bool:
        """Give the slot back; its memory stays reserved until `reclaim`. False if it had none."""
        if sequence not in self._open:
            return False
        self._open.discard(sequence)
        self._leaving.add(sequence)
        return True

    def reclaim(self, sequence: AdmittedSequence) -> None:
        """Take the memory back, when no batch uses it any more. From any thread."""
        for pool, cache in zip(self._pools, sequence.caches, strict=True):
            pool.release(cache)
        self._leaving.discard(sequence)

    def _look_for_room(self) -> None:
        """Have room made, as long as more wait than leave."""
        if self._look is not None:
            self._look.cancel()
            self._look = None
        if not self._waiting:
            return
        if len(self._leaving) < len(self._waiting):
            self.make_room()
        self._look = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look_for_room)

    def admit_waiting(self) -> None:
        """Admit those who wait, in their order, as long as they fit."""
        for sequence, (capacity, granted) in list(self._waiting.items()):
            if granted.done():
                continue
            if not self._try(sequence, capacity):
                return
            granted.set_result(None)

    def close(self, reason: str) -> None:
        """Fail all that wait, and all that come later."""
        self._closed = reason
        for _, granted in self._waiting.values():
            if not granted.done():
                granted.set_exception(Unavailable(reason))

    def _try(self, sequence: AdmittedSequence, capacity: int) -> bool:
        if len(self._open) >= self.limits.max_sequences:
            return False
        caches: list[Any] = []
        for pool in self._pools:
            cache = pool.reserve(capacity, sequence.nodes)
            if cache is None:
                for other, reserved in zip(self._pools, caches, strict=False):
                    other.release(reserved)
                return False
            caches.append(cache)
        sequence.caches = caches
        self._open.add(sequence)
        self.opened += 1
        return True

"""Which sequences are admitted, which wait, and which are refused."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import pytest

from tandem.engine.admission import Admission, AdmissionLimits, RoomWanted
from tandem.errors import Exhausted, InvalidRequest, Unavailable
from tandem.inference.kv.pool import KVPool, SequenceCache


@dataclass(eq=False)
class Sequence:
    """All that admission knows of one."""

    nodes: int = 0
    caches: list[SequenceCache] = field(init=False)


class Pool(KVPool):
    """Counts nodes as any position."""

    def reserve(  # type: ignore[override]  # as a model has it
        self, capacity: int, nodes: int = 0, held: int | None = None
    ) -> SequenceCache | None:
        return super().reserve(capacity, held)


class Place:
    """An admission over a pool, and the engine's part of it."""

    def __init__(
        self, *, positions: int = 100, sequences: int = 10, waiting: int = 10, seconds: float = 60
    ) -> None:
        self.pool = Pool(positions)
        limits = AdmissionLimits(sequences, waiting, seconds)
        self.admission = Admission((self.pool,), limits)

    async def enter(self, capacity: int) -> Sequence:
        sequence = Sequence()
        await self.admission.admit(sequence, RoomWanted(capacity))
        return sequence

    async def queue(self, capacity: int) -> asyncio.Task[Sequence]:
        """Someone who waits."""
        task = asyncio.create_task(self.enter(capacity))
        await asyncio.sleep(0)
        assert not task.done()
        return task

    def end(self, sequence: Sequence) -> None:
        """As the engine does between two steps."""
        assert self.admission.release(sequence)
        self.admission.reclaim(sequence)
        self.admission.admit_waiting()

    def empty(self) -> bool:
        return self.pool.free_positions == self.pool.positions and not self.admission.open_sequences


async def test_a_sequence_gets_what_it_asked_for_and_gives_it_back() -> None:
    place = Place()
    sequence = await place.enter(40)
    assert sequence.caches[0].capacity == 40
    assert place.admission.open_sequences == 1
    assert place.pool.free_positions == 60
    place.end(sequence)
    assert place.empty()
    assert not place.admission.release(sequence), "it has left already"
    assert place.admission.opened == 1


async def test_a_sequence_gets_a_part_of_every_pool_or_of_none() -> None:
    pools = Pool(100), Pool(20), Pool(100)
    admission = Admission(pools, AdmissionLimits(10, 10, 0.01))
    first = Sequence()
    await admission.admit(first, RoomWanted(15))
    assert [cache.pool for cache in first.caches] == list(pools)
    with pytest.raises(Exhausted):
        await admission.admit(Sequence(), RoomWanted(10))
    assert [pool.free_positions for pool in pools] == [85, 5, 85]
    assert admission.release(first)
    admission.reclaim(first)
    assert [pool.free_positions for pool in pools] == [100, 20, 100]


async def test_waiting_is_first_come_first_served() -> None:
    place = Place()
    first = await place.enter(80)
    large = await place.queue(50)
    small = await place.queue(10)
    await asyncio.sleep(0.01)
    assert not small.done(), "it would fit, but others are before it"
    place.end(first)
    place.end(await large)
    place.end(await small)
    assert place.empty()


async def test_room_wakes_as_many_as_fit() -> None:
    place = Place()
    first = await place.enter(100)
    waiting = [await place.queue(40) for _ in range(3)]
    place.end(first)
    await asyncio.sleep(0.01)
    assert [task.done() for task in waiting] == [True, True, False]
    place.end(await waiting[0])
    assert (await waiting[2]).caches[0].start == 0


async def test_a_place_is_as_good_as_memory() -> None:
    place = Place(sequences=1)
    first = await place.enter(1)
    second = await place.queue(1)
    place.end(first)
    await second


async def test_a_full_queue_refuses_at_once() -> None:
    place = Place(waiting=1)
    first = await place.enter(100)
    second = await place.queue(1)
    with pytest.raises(Exhausted, match="1 others wait"):
        await place.enter(1)
    place.end(first)
    place.end(await second)
    assert place.empty()


async def test_nobody_waits_for_too_long() -> None:
    place = Place(seconds=0.02)
    first = await place.enter(100)
    with pytest.raises(Exhausted, match=r"for more than 0\.02 s"):
        await place.enter(1)
    place.end(first)
    assert place.empty()


async def test_what_never_fits_is_refused_with_the_numbers() -> None:
    place = Place(positions=100)
    with pytest.raises(InvalidRequest, match=r"needs 101 positions .* which has 100"):
        await place.enter(101)
    assert (await place.enter(100)).caches[0].capacity == 100


async def test_a_cancelled_waiter_lets_the_next_one_in() -> None:
    place = Place()
    first = await place.enter(80)
    large, small = await place.queue(50), await place.queue(20)
    large.cancel()
    second = await small
    place.end(first)
    place.end(second)
    assert large.cancelled()
    assert place.empty()


async def test_a_waiter_cancelled_in_the_moment_of_its_grant_leaks_nothing() -> None:
    place = Place()
    first = await place.enter(100)
    waiting, behind = await place.queue(100), await place.queue(100)
    place.end(first)
    waiting.cancel()  # granted, but not awake yet
    place.end(await behind)
    assert waiting.cancelled()
    assert place.empty()


async def test_closing_fails_those_who_wait_and_those_who_come() -> None:
    place = Place()
    first = await place.enter(100)
    waiting = [await place.queue(1) for _ in range(2)]
    place.admission.close("the engine is stopping")
    for task in waiting:
        with pytest.raises(Unavailable, match="stopping"):
            await task
    with pytest.raises(Unavailable, match="stopping"):
        await place.enter(1)
    place.end(first)
    assert place.empty()


async def test_nodes_take_room_beside_the_text() -> None:
    place = Place(positions=20)
    sequence = Sequence(nodes=6)
    await place.admission.admit(sequence, RoomWanted(10))
    assert sequence.caches[0].capacity == 16
    with pytest.raises(InvalidRequest, match="needs 21 positions"):
        await place.admission.admit(Sequence(nodes=6), RoomWanted(15))


def overcommitted(times: float, *, positions: int = 1000, seconds: float = 60) -> Place:
    place = Place(positions=positions, seconds=seconds)
    place.admission.limits = replace(place.admission.limits, overcommit=times)
    return place


async def test_more_may_be_promised_than_there_is() -> None:
    place = overcommitted(2, seconds=0.01)
    assert (place.admission.promises, place.admission.longest) == (2000, 1000)
    sequences = [Sequence() for _ in range(4)]
    for sequence in sequences:
        grows = await place.admission.admit(sequence, RoomWanted(500, least=20))
        assert grows
        (cache,) = sequence.caches
        assert (cache.capacity, cache.promised) == (20, 500)
    assert (place.admission.promised, place.admission.longest) == (2000, 0)
    assert place.pool.free_positions == 920
    with pytest.raises(Exhausted):
        await place.admission.admit(Sequence(), RoomWanted(1, least=1))
    for sequence in sequences:
        place.end(sequence)
    assert (place.admission.promised, place.empty()) == (0, True)


async def test_what_is_promised_once_is_held_at_once() -> None:
    place = Place()
    sequence = Sequence(nodes=3)
    assert not await place.admission.admit(sequence, RoomWanted(40, least=5))
    assert sequence.caches[0].capacity == 43
    place.end(sequence)


async def test_who_opens_leaves_the_others_room_to_grow() -> None:
    place = overcommitted(4, positions=300, seconds=0.01)
    first = Sequence()
    assert await place.admission.admit(first, RoomWanted(250, least=100))
    with pytest.raises(Exhausted):
        await place.admission.admit(Sequence(), RoomWanted(250, least=137))
    assert await place.admission.admit(Sequence(), RoomWanted(250, least=136))
    # Whoever has all from the start needs no more of it.
    assert not await place.admission.admit(Sequence(), RoomWanted(60))


async def test_who_goes_first_waits_before_all_others_and_longer() -> None:
    place = overcommitted(4, positions=100, seconds=0.05)
    holding = await place.enter(100)
    other = await place.queue(10)
    first = Sequence()
    waiting = asyncio.create_task(place.admission.admit(first, RoomWanted(95, first=True)))
    with pytest.raises(Exhausted, match=r"more than 0.05 s"):
        await other
    assert not waiting.done()
    later = await place.queue(10)
    place.end(holding)
    assert not await waiting
    assert first.caches[0].capacity == 95
    place.end(first)
    await later


async def test_who_goes_first_and_is_refused_keeps_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tandem.engine.admission._FIRST_SECONDS", 0.0)
    place = overcommitted(4, positions=100, seconds=0.05)
    holding = await place.enter(100)
    first = RoomWanted(95, first=True)
    with pytest.raises(Exhausted):
        await place.admission.admit(Sequence(), first)
    place.end(holding)
    with pytest.raises(Exhausted):  # it would fit
        await place.enter(10)
    again = Sequence()
    assert not await place.admission.admit(again, first)
    place.end(again)


async def test_those_that_go_first_do_so_in_their_order() -> None:
    place = overcommitted(4, positions=100)
    holding = await place.enter(100)
    sequences = [Sequence() for _ in range(3)]
    waiting = [
        asyncio.create_task(place.admission.admit(one, RoomWanted(90, first=True)))
        for one in sequences
    ]
    await asyncio.sleep(0)
    place.end(holding)
    for one, task in zip(sequences, waiting, strict=True):
        await task
        place.end(one)


async def test_what_was_given_back_is_promised_no_more() -> None:
    place = overcommitted(2)
    sequence = Sequence()
    await place.admission.admit(sequence, RoomWanted(500, least=20))
    place.admission.reclaim(sequence)
    place.admission.promise_no_more([sequence])
    assert (place.admission.promised, place.admission.open_sequences) == (0, 1)
    assert place.admission.release(sequence)
    assert place.admission.promised == 0

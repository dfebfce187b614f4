"""Which requests begin a text, which wait for a place, and which are refused at once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from orchestrator.front.queue import QueueLimits, TextQueue
from orchestrator.pool.capacity import TargetCapacity
from tandem.errors import DeadlineExceeded, Exhausted
from tests.support.waiting import HANG_SECONDS


@dataclass
class Desk:
    """Places over a room that tests change, and texts that begin and end when they say."""

    room: TargetCapacity = field(default_factory=lambda: TargetCapacity(1))
    waiting: int = 8
    seconds: float = 5.0
    of_client: int = 0
    now: float = 0.0
    began: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        limits = QueueLimits(self.waiting, self.seconds, self.of_client)
        self.places = TextQueue(lambda: self.room, limits, clock=lambda: self.now)
        self.beginning = asyncio.Event()
        self.ends: dict[str, asyncio.Event] = {}

    def text(
        self, name: str, client: str = "", tokens: int = 1, remaining: float | None = None
    ) -> asyncio.Task[None]:
        """One that goes on until it is ended."""
        end = self.ends[name] = asyncio.Event()

        async def go_on() -> None:
            with self.places.presence(client):
                async with self.places.admitted(client, tokens, remaining):
                    self.began.append(name)
                    self.beginning.set()
                    await end.wait()

        return asyncio.create_task(go_on())

    async def end(self, name: str) -> None:
        self.ends[name].set()
        await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def start(*texts: asyncio.Task[None]) -> None:
    await settle()
    for text in texts:
        if text.done():
            text.result()


async def fail(text: asyncio.Task[None], kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind, match=sentence):
        await text


async def test_places_are_taken_and_given_back() -> None:
    desk = Desk(TargetCapacity(2))
    texts = [desk.text(name) for name in "abc"]
    await start(*texts)
    assert desk.began == ["a", "b"]
    assert desk.places.waiting == 1
    await desk.end("b")
    assert desk.began == ["a", "b", "c"]
    for name in "ac":
        await desk.end(name)
    await asyncio.gather(*texts)
    assert desk.places.waiting == 0
    texts = [desk.text(name) for name in "de"]
    await start(*texts)
    assert desk.began[-2:] == ["d", "e"]
    for name in "de":
        await desk.end(name)
    await asyncio.gather(*texts)


async def test_the_first_deadline_is_first() -> None:
    desk = Desk()
    texts = [
        desk.text("running"),
        desk.text("any time"),
        desk.text("late", remaining=60.0),
        desk.text("soon", remaining=30.0),
    ]
    await start(*texts)
    for name in ("running", "soon", "late", "any time"):
        assert desk.began[-1] == name
        await desk.end(name)
    await asyncio.gather(*texts)


async def test_the_client_with_the_fewest_texts_is_first() -> None:
    desk = Desk(TargetCapacity(2))
    texts = [desk.text(f"greedy {number}", "greedy") for number in range(4)]
    await settle()
    texts += [desk.text("modest 0", "modest"), desk.text("modest 1", "modest")]
    await start(*texts)
    for name in ("greedy 0", "greedy 1", "modest 0", "greedy 2"):
        await desk.end(name)
    # After "greedy 0" modest has none and greedy one; after "greedy 1" greedy has none.
    assert desk.began == ["greedy 0", "greedy 1", "modest 0", "greedy 2", "modest 1", "greedy 3"]
    for name in ("modest 1", "greedy 3"):
        await desk.end(name)
    await asyncio.gather(*texts)


async def test_a_full_queue_refuses_at_once_and_makes_room_for_those_with_fewer() -> None:
    desk = Desk(waiting=2)
    texts = [desk.text(f"{number}", "greedy") for number in range(3)]
    await start(*texts)
    await fail(desk.text("3", "greedy"), Exhausted, "every place is taken, and 2 others wait")
    modest = desk.text("modest", "modest")
    await settle()
    await fail(texts[2], Exhausted, "clients with fewer texts came")
    for name in ("0", "1", "modest"):
        assert desk.began[-1] == name
        await desk.end(name)
    await asyncio.gather(texts[0], texts[1], modest)


async def test_who_would_wait_too_long_is_told_when_to_come_again() -> None:
    desk = Desk(seconds=5.0)
    first = desk.text("first")
    await start(first)
    desk.now = 4.0
    await desk.end("first")  # so that texts hold places for four seconds
    texts = [desk.text(name) for name in "ab"]
    await start(*texts)
    refused = desk.text("c")
    await fail(refused, Exhausted, r"1 others would have theirs first; try again in 8\.0 s")
    error = refused.exception()
    assert isinstance(error, Exhausted)
    assert error.retry_seconds == pytest.approx(8.0)
    for name in "ab":
        await desk.end(name)
    await asyncio.gather(*texts)


async def test_a_deadline_that_cannot_be_kept_is_refused_at_once() -> None:
    desk = Desk(seconds=60.0)
    first = desk.text("first")
    await start(first)
    desk.now = 4.0
    await desk.end("first")
    texts = [desk.text(name) for name in "ab"]
    await start(*texts)
    await fail(desk.text("c", remaining=7.0), Exhausted, "would have theirs first")
    for name in "ab":
        await desk.end(name)
    await asyncio.gather(*texts)


async def test_tokens_are_room_as_well() -> None:
    desk = Desk(TargetCapacity(8, 100))
    texts = [desk.text("a", tokens=60), desk.text("b", tokens=60), desk.text("c", tokens=30)]
    await start(*texts)
    assert desk.began == ["a"]  # a small one does not pass by a large one for ever
    await desk.end("a")
    assert desk.began == ["a", "b", "c"]
    for name in "bc":
        await desk.end(name)
    await asyncio.gather(*texts)


async def test_a_text_that_no_target_could_hold_holds_nobody_up() -> None:
    """The target that it goes to refuses it, in its own words."""
    desk = Desk(TargetCapacity(8, 200, 100))
    texts = [desk.text("a", tokens=60), desk.text("never", tokens=201), desk.text("b", tokens=60)]
    await start(*texts)
    assert desk.began == ["a", "never"]
    await desk.end("never")
    assert desk.began == ["a", "never", "b"]
    for name in "ab":
        await desk.end(name)
    await asyncio.gather(*texts)


async def test_a_client_may_have_so_many() -> None:
    desk = Desk(TargetCapacity(8), of_client=2)
    texts = [desk.text("a", "one"), desk.text("b", "one"), desk.text("c", "other")]
    await start(*texts)
    await fail(desk.text("d", "one"), Exhausted, "2 texts of yours .* a client may have 2")
    await desk.end("a")
    # One that has come counts before it asks for a place: its prompt may be being encoded.
    with desk.places.presence("one"):
        await fail(desk.text("e", "one"), Exhausted, "2 texts of yours .* a client may have 2")
    texts.append(desk.text("f", "one"))
    await settle()
    for name in "bcf":
        await desk.end(name)
    await asyncio.gather(*texts)
    assert desk.began == ["a", "b", "c", "f"]


@pytest.mark.parametrize("granted", [False, True])
async def test_who_gives_up_holds_nothing(granted: bool) -> None:
    desk = Desk()
    first = desk.text("first")
    second = desk.text("second")
    third = desk.text("third")
    await start(first, second, third)
    if granted:
        # The place is given to the second in the moment in which it is cancelled.
        desk.ends["first"].set()
        await asyncio.sleep(0)
        second.cancel()
    else:
        second.cancel()
        await settle()
        desk.ends["first"].set()
    await settle()
    assert desk.began == ["first", "third"]
    await desk.end("third")
    await asyncio.gather(first, third)
    assert second.cancelled()
    again = desk.text("again")
    await start(again)
    assert desk.began[-1] == "again"
    await desk.end("again")
    await again


async def test_a_deadline_that_passes_in_the_queue_is_its_own_error() -> None:
    desk = Desk()
    first, second = desk.text("first"), desk.text("second", remaining=0.02)
    await start(first, second)
    await fail(second, DeadlineExceeded, "the deadline passed before there was a place")
    await desk.end("first")
    await first


async def test_a_wait_is_bounded_whatever_was_expected() -> None:
    desk = Desk(seconds=0.01)
    first, second = desk.text("first"), desk.text("second")
    await start(first, second)
    await fail(second, Exhausted, "none came free in 0.04 s")
    await desk.end("first")
    await first


async def test_room_that_others_make_is_seen() -> None:
    desk = Desk(TargetCapacity(0))
    text = desk.text("text")
    await start(text)
    desk.room = TargetCapacity(1)
    async with asyncio.timeout(HANG_SECONDS):
        await desk.beginning.wait()
    await desk.end("text")
    await text


async def test_none_may_wait_for_tokens_where_none_may_wait() -> None:
    desk = Desk(TargetCapacity(2, tokens=10), waiting=0)
    first = desk.text("first", tokens=8)
    await asyncio.sleep(0)
    with pytest.raises(Exhausted, match="every place is taken, and none may wait"):
        await desk.text("second", tokens=8)
    desk.ends["first"].set()
    await first


async def test_who_leaves_in_the_turn_in_which_another_comes_makes_room_for_it() -> None:
    desk = Desk(waiting=2)
    texts = [desk.text(name, "greedy") for name in ("first", "second", "third")]
    await asyncio.sleep(0.01)

    async def leave() -> None:
        texts[2].cancel()

    leaving = asyncio.create_task(leave())
    modest = desk.text("modest", "modest")  # its turn comes after the leave, before the third's
    await asyncio.sleep(0.01)
    assert not modest.done()
    assert desk.places.waiting == 2
    for name in ("first", "second", "modest"):
        desk.ends[name].set()
    await asyncio.gather(leaving, modest, *texts[:2])

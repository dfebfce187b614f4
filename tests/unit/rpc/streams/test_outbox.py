"""Outgoing messages: sent together when they come together, in order, in a bounded queue."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tandem.rpc.streams import outbox
from tandem.rpc.streams.outbox import Outbox
from tandem.target.v1 import target_pb2
from tests.support.waiting import HANG_SECONDS


def _never() -> None:
    pytest.fail("a write was late")


class Wire:
    """Takes what is written, when it is let."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.free = asyncio.Event()
        self.free.set()

    async def write(self, message: bytes) -> None:
        await self.free.wait()
        self.written.append(message)


async def test_what_comes_in_one_turn_goes_together_and_in_order() -> None:
    box, wire, told = Outbox(), Wire(), list[int]()
    pouring = asyncio.create_task(box.pour(wire.write, 5, _never))
    await asyncio.sleep(0)
    for i in range(3):
        box.put(b"%d" % i, written=lambda i=i: told.append(i))  # type: ignore[misc]
    assert not told
    await asyncio.sleep(0.01)
    assert (wire.written, told) == ([b"012"], [0, 1, 2])
    box.put(b"3")
    box.finish()
    await pouring
    assert wire.written == [b"012", b"3"]


async def test_what_comes_during_a_write_goes_with_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outbox, "BATCH_BYTES", 4)
    box, wire = Outbox(), Wire()
    pouring = asyncio.create_task(box.pour(wire.write, 5, _never))
    wire.free.clear()
    for part in (b"a", b"bb", b"c", b"dddddd", b"ee"):
        box.put(part)
        await asyncio.sleep(0)
    wire.free.set()
    box.finish()
    await pouring
    # Larger than a batch may be: alone.
    assert b"".join(wire.written) == b"abbcddddddee"
    assert b"dddddd" in wire.written
    assert all(len(message) <= 4 for message in wire.written if message != b"dddddd")
    assert len(wire.written) < 5


async def test_joined_messages_are_one_with_all_entries() -> None:
    answers = [target_pb2.SequenceResponse(sequence=number) for number in (1, 2, 3)]
    parts = [target_pb2.VerifyResponse(responses=[a]).SerializeToString() for a in answers]
    joined = target_pb2.VerifyResponse.FromString(b"".join(parts))
    assert list(joined.responses) == answers


async def test_a_write_that_takes_too_long_is_told_of_and_goes_on() -> None:
    box, wire = Outbox(), Wire()
    wire.free.clear()
    box.put(b"a")
    box.finish()
    # The telling frees the write here; nothing else does.
    await box.pour(wire.write, 0.05, wire.free.set)
    assert wire.written == [b"a"]


async def test_room_is_waited_for() -> None:
    box, wire = Outbox(), Wire()
    for _ in range(5):
        box.put(b"a")
    waiting: asyncio.Task[Any] = asyncio.create_task(box.room(3, 100))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    pouring = asyncio.create_task(box.pour(wire.write, 5, _never))
    async with asyncio.timeout(HANG_SECONDS):
        await waiting
    pouring.cancel()


async def test_what_is_abandoned_ends_behind_the_write_at_hand() -> None:
    box, wire = Outbox(), Wire()
    wire.free.clear()
    pouring = asyncio.create_task(box.pour(wire.write, 5, _never))
    box.put(b"at hand")
    await asyncio.sleep(0.01)
    box.put(b"after it")
    box.abandon()
    await asyncio.sleep(0.01)
    assert not pouring.done()
    wire.free.set()
    await pouring
    assert wire.written == [b"at hand"]

"""Streams that carry no sequence or nothing useful: how many are allowed, and what they cost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from drafter_svc.servicer import make_service as make_drafter
from drafter_svc.settings import DrafterSettings
from tandem.drafter.v1 import drafter_pb2, drafter_pb2_grpc
from tandem.rpc import health
from tandem.rpc.streams import server as stream
from tests.service.conftest import address_of, connect, start
from tests.support.waiting import HANG_SECONDS
from tests.support.wire.talk import Talk

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.fixture
async def drafter(random_pair: tuple[Path, Path]) -> AsyncIterator[tuple[Any, str]]:
    """A drafter that takes two new streams, and those for a moment."""
    async with AsyncExitStack() as stack:
        settings = DrafterSettings(
            model=str(random_pair[0]), max_empty_streams=2, empty_seconds=2.0, idle_seconds=60
        )
        server = await start(stack, make_drafter(settings))
        channel = await connect(stack, address_of(server))
        await server.ready()
        yield drafter_pb2_grpc.DrafterServiceStub(channel), address_of(server)


def drafting(prompt: list[int]) -> drafter_pb2.SequenceRequest:
    opening = drafter_pb2.OpenSequence(
        token_ids=prompt,
        sampling={"seed": 0},  # type: ignore[arg-type]
        target_vocab_size=5,
        max_new_tokens=4,
    )
    return drafter_pb2.SequenceRequest(open=opening)


async def test_streams_that_do_not_open_are_bounded_in_number_and_time(
    drafter: tuple[Any, str],
) -> None:
    stub, _ = drafter
    silent = [stub.Draft() for _ in range(2)]
    for call in silent:
        await call.wait_for_connection()
    await asyncio.sleep(0.05)
    late = stub.Draft()
    assert await late.code() == EXHAUSTED
    assert "2 streams have no sequence" in str(await late.details())
    for call in silent:
        async with asyncio.timeout(HANG_SECONDS):
            assert await call.code() == grpc.StatusCode.ABORTED
        assert "no sequence for 2 s" in str(await call.details())
    opened = stub.Draft()
    close = drafter_pb2.SequenceRequest(close=drafter_pb2.CloseSequence())
    assert await Talk(opened).ask(close) is grpc.aio.EOF
    opened.cancel()


async def test_streams_that_open_nothing_make_room_when_they_are_no_longer_new(
    drafter: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_NEW_SECONDS", 0.2)
    stub, _ = drafter
    silent = []
    for _ in range(2):
        silent.append(stub.Draft())
        await silent[-1].wait_for_connection()
        await asyncio.sleep(0.15)
    another = Talk(stub.Draft())
    assert (await another.ask(drafting([1]))).HasField("opened")
    assert await silent[0].code() == grpc.StatusCode.ABORTED
    assert not silent[1].done()
    for call in (silent[1], another):
        call.cancel()


async def test_a_stream_that_is_kept_for_later_makes_room(drafter: tuple[Any, str]) -> None:
    """Orchestrators keep theirs; their next text opens another."""
    stub, _ = drafter
    close = drafter_pb2.SequenceRequest(close=drafter_pb2.CloseSequence())
    kept = [Talk(stub.Draft()) for _ in range(2)]
    for talk in kept:
        assert (await talk.ask(drafting([1]))).HasField("opened")
        assert await talk.ask(close) is grpc.aio.EOF
    another = Talk(stub.Draft())
    assert (await another.ask(drafting([1]))).HasField("opened")
    codes = []
    for talk in kept:
        async with asyncio.timeout(HANG_SECONDS):
            codes.append(await talk.call.code())
    # One at once; the other one when its time was over.
    assert sorted(code.name for code in codes) == ["ABORTED", "UNAVAILABLE"]
    another.cancel()


async def test_a_stream_that_is_left_but_not_over_makes_room_once(
    drafter: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last answers are not read: it is told to end, and ends late."""
    monkeypatch.setattr(stream._Stream, "note_drain", lambda self: setattr(self, "_leaving", True))
    stub, _ = drafter
    close = drafter_pb2.SequenceRequest(close=drafter_pb2.CloseSequence())
    kept = Talk(stub.Draft())
    assert (await kept.ask(drafting([1]))).HasField("opened")
    await kept.call.write(drafter_pb2.DraftRequest(requests=[numbered(close, 1)]))
    assert (await kept.call.read()).responses[0].HasField("ended")
    others = []
    for _ in range(2):
        others.append(stub.Draft())
        await others[-1].wait_for_connection()
        await asyncio.sleep(0.05)
    others.append(stub.Draft())
    assert await others[-1].code() == EXHAUSTED
    for call in (kept, *others):
        call.cancel()


async def test_watches_are_bounded(
    drafter: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who watches need not prove who he is."""
    monkeypatch.setattr(health, "_MOST_WATCHES", 2)
    _, address = drafter
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        for watch in watches:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        assert await stub.Watch(health_pb2.HealthCheckRequest()).code() == EXHAUSTED
        watches[0].cancel()
        async with asyncio.timeout(HANG_SECONDS):
            while True:
                another = stub.Watch(health_pb2.HealthCheckRequest())
                if await another.read() is not grpc.aio.EOF:
                    break
                await asyncio.sleep(0.01)


async def test_a_stream_of_refused_requests_is_read_later_and_no_other_is(
    drafter: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_FAULT_SECONDS", 60.0)
    stub, _ = drafter
    step = drafter_pb2.SequenceRequest(draft=drafter_pb2.DraftStep(round=1, position=1))
    flood = stub.Draft()
    await flood.write(drafter_pb2.DraftRequest(requests=[numbered(step, n) for n in (1, 2)]))
    answers: list[Any] = []
    async with asyncio.timeout(HANG_SECONDS):
        while len(answers) < 2:
            answers += (await flood.read()).responses
    assert {answer.ended.code for answer in answers} == {9}  # FAILED_PRECONDITION
    # It is read one message further than its refusals are counted.
    await flood.write(drafter_pb2.DraftRequest(requests=[numbered(step, 3)]))
    assert (await flood.read()).responses[0].ended.code == 9
    await flood.write(drafter_pb2.DraftRequest(requests=[numbered(drafting([1]), 4)]))
    another = Talk(stub.Draft())
    assert (await another.ask(drafting([1]))).HasField("opened")
    # Its opening was not read in all the time that it may have no sequence.
    async with asyncio.timeout(HANG_SECONDS):
        assert await flood.code() == grpc.StatusCode.ABORTED
    another.cancel()


def numbered(request: Any, sequence: int) -> Any:
    """The same, for a sequence."""
    copy = drafter_pb2.SequenceRequest(sequence=sequence)
    copy.MergeFrom(request)
    copy.sequence = sequence
    return copy

"""Streams that carry many sequences: what they share, and what ends one of them alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from drafter_svc.servicer import make_service as make_drafter
from drafter_svc.settings import DrafterSettings
from tandem.drafter.v1 import drafter_pb2, drafter_pb2_grpc
from tandem.rpc.server import RunningServer
from tests.service.conftest import Stack, address_of, connect, start
from tests.service.test_streams import draft_step, open_draft

Code = grpc.StatusCode
OK, WRONG_STATE = Code.OK.value[0], Code.FAILED_PRECONDITION.value[0]
INVALID = Code.INVALID_ARGUMENT.value[0]


def of(number: int, request: drafter_pb2.SequenceRequest) -> drafter_pb2.SequenceRequest:
    request.sequence = number
    return request


def close_draft() -> drafter_pb2.SequenceRequest:
    return drafter_pb2.SequenceRequest(close=drafter_pb2.CloseSequence())


class Stream:
    """A Draft stream, and the messages that came on it."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.messages = 0

    async def write(self, *requests: drafter_pb2.SequenceRequest) -> None:
        await self.call.write(drafter_pb2.DraftRequest(requests=requests))

    async def read(self, count: int) -> dict[int, list[Any]]:
        """So many answers, by sequence."""
        answers: dict[int, list[Any]] = {}
        while sum(map(len, answers.values())) < count:
            async with asyncio.timeout(10):
                message = await self.call.read()
            self.messages += 1
            for answer in message.responses:
                answers.setdefault(answer.sequence, []).append(answer)
        return answers

    async def open(self, *numbers: int) -> None:
        await self.write(*(of(number, open_draft()) for number in numbers))
        answers = await self.read(len(numbers))
        assert all(answer.HasField("opened") for (answer,) in answers.values())


@pytest.fixture
async def stream(stack: Stack) -> AsyncIterator[Stream]:
    stream = Stream(stack.drafter.Draft())
    yield stream
    stream.call.cancel()


async def test_what_sequences_say_together_goes_together(stack: Stack, stream: Stream) -> None:
    await stream.open(1, 2, 3)
    before, stream.messages = stream.messages, 0
    await stream.write(*(of(number, draft_step()) for number in (3, 1, 2)))
    answers = await stream.read(3)
    assert sorted(answers) == [1, 2, 3]
    assert all(len(answer.drafted.draft.token_ids) == 3 for (answer,) in answers.values())
    assert {answer.drafted.times.batch_size for (answer,) in answers.values()} == {3}
    assert (before, stream.messages) == (before, 1)
    assert await stack.open_sequences() == 3
    stream.call.cancel()
    for _ in range(200):
        if not await stack.open_sequences():
            return
        await asyncio.sleep(0.01)
    pytest.fail("the end of the stream leaves sequences open")


async def test_a_sequence_that_fails_ends_alone(stack: Stack, stream: Stream) -> None:
    await stream.open(1, 2)
    await stream.write(of(1, draft_step()), of(2, draft_step(gamma=99)))
    answers = await stream.read(2)
    assert answers[1][0].HasField("drafted")
    ended = answers[2][0].ended
    assert (ended.code, "draft.gamma" in ended.sentence) == (INVALID, True)
    await stream.write(of(1, draft_step(round=2, position=4)))
    assert (await stream.read(1))[1][0].HasField("drafted")
    assert await stack.open_sequences() == 1


async def test_numbers_only_grow(stream: Stream) -> None:
    await stream.open(5)
    await stream.write(of(4, open_draft()), of(0, open_draft()))
    for number, (answer,) in (await stream.read(2)).items():
        assert answer.ended.code == WRONG_STATE
        assert f"sequence {number} is over, or not above 5" in answer.ended.sentence
    await stream.write(of(5, close_draft()))
    assert (await stream.read(1))[5][0].ended.code == OK
    # A close may cross the service's own end.
    await stream.write(of(5, close_draft()))
    assert (await stream.read(1))[5][0].ended.code == OK
    await stream.write(of(5, open_draft()))
    assert (await stream.read(1))[5][0].ended.code == WRONG_STATE
    await stream.open(6)


async def test_one_request_at_a_time(stack: Stack, stream: Stream) -> None:
    await stream.open(1, 2)
    await stream.write(of(1, draft_step()), of(1, draft_step(round=2)), of(2, draft_step()))
    answers = await stream.read(2)
    assert [answer.WhichOneof("result") for answer in answers[1]] == ["ended"]
    assert answers[1][0].ended.code == WRONG_STATE
    assert "before the answer" in answers[1][0].ended.sentence
    assert answers[2][0].HasField("drafted")
    assert await stack.open_sequences() == 1


async def test_close_gives_up_what_is_being_computed(stack: Stack, stream: Stream) -> None:
    await stream.open(1, 2)
    await stream.write(of(1, draft_step()), of(2, draft_step()), of(1, close_draft()))
    answers = await stream.read(2)
    assert [answer.WhichOneof("result") for answer in answers[1]] == ["ended"]
    assert answers[1][0].ended.code == OK
    assert answers[2][0].HasField("drafted")
    assert await stack.open_sequences() == 1


async def test_requests_in_a_message_are_bounded(stack: Stack, stream: Stream) -> None:
    await stream.open(1)
    await stream.write(*[drafter_pb2.SequenceRequest()] * 1025)
    assert await stream.call.code() == Code.INVALID_ARGUMENT
    assert "requests may hold 1024 here, got 1025" in str(await stream.call.details())
    assert await stack.open_sequences() == 0


@pytest.fixture
async def server(random_pair: tuple[Path, Path]) -> AsyncIterator[tuple[RunningServer, Any]]:
    """A drafter that is impatient, and its stub."""
    async with AsyncExitStack() as stack:
        settings = DrafterSettings(model=str(random_pair[0]), idle_seconds=0.5)
        server = await start(stack, make_drafter(settings))
        channel = await connect(stack, address_of(server))
        await server.ready()
        yield server, drafter_pb2_grpc.DrafterServiceStub(channel)


async def test_answers_that_nobody_reads_are_bounded(server: tuple[RunningServer, Any]) -> None:
    """Requests of nobody cost the caller little, and their answers must not cost us more."""
    stream, stub = Stream(server[1].Draft()), server[1]
    await stream.open(1)
    junk = drafter_pb2.DraftRequest(requests=[drafter_pb2.SequenceRequest()] * 1024)

    async def flood() -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for _ in range(10_000):
                await stream.call.write(junk)

    flooding = asyncio.create_task(flood())
    done, _ = await asyncio.wait((flooding,), timeout=3)
    assert not done, "the service reads no more"
    info = await stub.GetModelInfo(drafter_pb2.GetModelInfoRequest())
    assert info.stats.open_sequences == 0
    with contextlib.suppress(grpc.aio.AioRpcError):
        while True:
            await stream.read(1)
    # ABORTED, unless the library has put the failure of our own write in its place.
    assert await stream.call.code() in (Code.ABORTED, Code.INTERNAL)
    await flooding


async def test_a_drain_lets_open_sequences_go_on(server: tuple[RunningServer, Any]) -> None:
    stream, empty = Stream(server[1].Draft()), server[1].Draft()
    await empty.wait_for_connection()
    await stream.open(1)
    stopping = asyncio.create_task(server[0].stop(10))
    assert await empty.code() == Code.UNAVAILABLE
    await stream.write(of(1, draft_step()), of(2, open_draft()))
    answers = await stream.read(2)
    assert answers[1][0].HasField("drafted")
    assert answers[2][0].ended.code == Code.UNAVAILABLE.value[0]
    assert not stopping.done()
    await stream.write(of(1, close_draft()))
    assert (await stream.read(1))[1][0].ended.code == OK
    assert await stream.call.code() == Code.UNAVAILABLE
    async with asyncio.timeout(5):
        await stopping

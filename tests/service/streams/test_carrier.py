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

from drafter_svc.servicer import DrafterServicer, service_of
from drafter_svc.settings import DrafterSettings
from tandem.drafter.v1 import drafter_pb2, drafter_pb2_grpc
from tandem.rpc.server import RunningServer
from tandem.rpc.streams import server as stream_module
from tests.service.conftest import Stack, address_of, connect, start
from tests.support.waiting import HANG_SECONDS
from tests.support.wire.steps import draft_step, open_draft

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
            async with asyncio.timeout(HANG_SECONDS):
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


class Impatient:
    """A drafter that waits for half a second only, and takes two streams without a sequence."""

    def __init__(self, model: Path) -> None:
        settings = DrafterSettings(model=str(model), idle_seconds=0.5, max_empty_streams=2)
        self.servicer = DrafterServicer(settings)
        self.server: RunningServer
        self.stub: Any

    @property
    def running(self) -> list[Any]:
        """Streams, as the service has them."""
        return list(self.servicer.streams._running)


@pytest.fixture
async def impatient(random_pair: tuple[Path, Path]) -> AsyncIterator[Impatient]:
    async with AsyncExitStack() as stack:
        impatient = Impatient(random_pair[0])
        impatient.server = await start(stack, service_of(impatient.servicer))
        channel = await connect(stack, address_of(impatient.server))
        await impatient.server.ready()
        impatient.stub = drafter_pb2_grpc.DrafterServiceStub(channel)
        yield impatient


async def flood(call: Any) -> None:
    """Requests of nobody: they cost the caller two bytes, and their answers us a hundred."""
    junk = drafter_pb2.DraftRequest(requests=[drafter_pb2.SequenceRequest()] * 1024)
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while True:
            await call.write(junk)


async def test_answers_that_nobody_reads_are_bounded(
    impatient: Impatient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "_MAX_WAITING_BYTES", 200_000)
    monkeypatch.setattr(stream_module, "_FAULT_SECONDS", 0.0)  # as good requests' answers come
    calls = []
    for _ in range(3):
        calls.append(impatient.stub.Draft())
        await Stream(calls[-1]).open(1)
    floods = [asyncio.create_task(flood(call)) for call in calls]
    most = 0
    for _ in range(300):
        await asyncio.sleep(0.01)
        most = max([most, *(len(stream._outbox._waiting) for stream in impatient.running)])
    # A message of requests is answered as a whole, and at most another one's answers wait.
    assert 500 < most < 4 * 1024
    assert not impatient.running, "they are ended, whether or not a status can be sent"
    info = await impatient.stub.GetModelInfo(drafter_pb2.GetModelInfoRequest())
    assert info.stats.open_sequences == 0
    # Callers who do not read cost nobody else a place.
    await Stream(impatient.stub.Draft()).open(1)
    for call in calls:
        call.cancel()
    await asyncio.gather(*floods, return_exceptions=True)


async def test_a_drain_lets_open_sequences_go_on(impatient: Impatient) -> None:
    stream, empty = Stream(impatient.stub.Draft()), impatient.stub.Draft()
    await empty.wait_for_connection()
    await stream.open(1)
    stopping = asyncio.create_task(impatient.server.stop(10))
    assert await empty.code() == Code.UNAVAILABLE
    await stream.write(of(1, draft_step()), of(2, open_draft()))
    answers = await stream.read(2)
    assert answers[1][0].HasField("drafted")
    assert answers[2][0].ended.code == Code.UNAVAILABLE.value[0]
    assert not stopping.done()
    await stream.write(of(1, close_draft()))
    assert (await stream.read(1))[1][0].ended.code == OK
    assert await stream.call.code() == Code.UNAVAILABLE
    async with asyncio.timeout(HANG_SECONDS):
        await stopping

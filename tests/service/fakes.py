"""Services without a model: they draft and accept by arithmetic. Free of torch."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc

from orchestrator.servicer import make_service
from orchestrator.settings import OrchestratorSettings
from tandem.common.v1 import common_pb2
from tandem.drafter.v1 import drafter_pb2, drafter_pb2_grpc
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.rpc.server import RunningServer
from tandem.target.v1 import target_pb2, target_pb2_grpc

VOCAB_SIZE = 100
CHAIN = common_pb2.DRAFT_SHAPE_CHAIN
RULES = {
    "block": target_pb2.VerifierInfo(name="block", lossless=True, takes=CHAIN, resumable=True),
    "greedy_block": target_pb2.VerifierInfo(
        name="greedy_block", lossless=True, takes=CHAIN, needs_pure=True, fixed_gamma=True
    ),
    "token": target_pb2.VerifierInfo(name="token", lossless=True, takes=CHAIN, resumable=True),
}


class Ended(Exception):
    """A sequence that a fake ends."""


class FakeContext:
    """What interferes with a fake can do to a sequence and its stream."""

    def __init__(
        self, over: asyncio.Future[None], end: Callable[[grpc.StatusCode, str], Awaitable[None]]
    ) -> None:
        self._over = over
        self._end = end
        self._ending: asyncio.Task[None] | None = None

    def end_later(self, code: grpc.StatusCode, sentence: str) -> None:
        """End the sequence soon behind the answer to its request."""

        async def end() -> None:
            await asyncio.sleep(0.03)
            await self._end(code, sentence)

        self._ending = asyncio.ensure_future(end())

    def end_stream(self, code: grpc.StatusCode, sentence: str) -> None:
        """End the stream, with all its sequences."""
        self._over.set_exception(Ended(code, sentence))

    async def abort(self, code: grpc.StatusCode, sentence: str) -> None:
        """End the sequence."""
        raise Ended(code, sentence)


async def _go_on(round_: int | None, context: FakeContext) -> None:
    """Nothing happens."""


def _leave(reply: Any) -> None:
    """Nothing is changed."""


class Fake:
    """What both have.

    Attributes:
        opened: sequences so far.
        ended: of those, the ones that are over.
        streams: so far.
        interfere: called before each answer, with its round (None for the open's) and a
            context; may raise, abort or hang.
        alter: called with each answer; may change it.
    """

    message: Any
    answer: Any

    def __init__(self, **changes: Any) -> None:
        fields: dict[str, Any] = {
            "model": "fake",
            "protocol_version": 2,
            "vocab_size": VOCAB_SIZE,
            "max_length": 1000,
            "max_gamma": 8,
            "max_sequences": 8,
            "dtype": "float32",
            "device": "cpu",
            "max_message_bytes": 1 << 20,
        }
        self.info = common_pb2.ModelInfo(**(fields | changes))
        self.opened = self.ended = self.streams = 0
        self.interfere: Callable[[int | None, FakeContext], Awaitable[None]] = _go_on
        self.alter: Callable[[Any], None] = _leave
        self._writing = asyncio.Lock()

    async def serve(self, context: Any) -> None:
        """Answer the sequences of a stream, each for itself."""
        self.streams += 1
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        open_: dict[int, tuple[asyncio.Task[None], asyncio.Queue[Any]]] = {}
        reading = asyncio.create_task(self._read(context, open_, over))
        try:
            await over
        except Ended as end:
            await context.abort(*end.args)
        finally:
            reading.cancel()
            for task, _ in open_.values():
                task.cancel()

    async def _read(self, context: Any, open_: dict[int, Any], over: asyncio.Future[None]) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            for request in message.requests:
                await self._hear(request, open_, context, over)
        if not over.done():
            over.set_result(None)

    async def _hear(
        self, request: Any, open_: dict[int, Any], context: Any, over: asyncio.Future[None]
    ) -> None:
        number = request.sequence
        if request.HasField("close"):
            task, _ = open_.pop(number)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await self._say(context, number, ended=common_pb2.SequenceEnd())
            return
        if number not in open_:
            assert request.HasField("open")
            inbox: asyncio.Queue[Any] = asyncio.Queue()
            task = asyncio.create_task(self._converse(number, inbox, context, over))
            open_[number] = task, inbox
        open_[number][1].put_nowait(request)

    async def _converse(
        self,
        number: int,
        inbox: asyncio.Queue[Any],
        context: Any,
        over: asyncio.Future[None],
    ) -> None:
        tokens: list[int] = []
        last = -1
        self.opened += 1

        async def end(code: grpc.StatusCode, sentence: str) -> None:
            ended = common_pb2.SequenceEnd(code=code.value[0], sentence=sentence)
            await self._say(context, number, ended=ended)

        try:
            while True:
                request = await inbox.get()
                round_ = self.round_of(request)
                assert round_ is None or round_ > last, "a round that was used already"
                last = request.open.first_round if round_ is None else round_
                await self.interfere(round_, FakeContext(over, end))
                reply = self.answer_to(request, tokens)
                self.alter(reply)
                reply.sequence = number
                await self._write(context, reply)
        except Ended as failure:
            await end(*failure.args)
        except Exception as error:
            await end(grpc.StatusCode.UNKNOWN, str(error))
            raise
        finally:
            self.ended += 1

    async def _say(self, context: Any, number: int, **result: Any) -> None:
        await self._write(context, self.answer(sequence=number, **result))

    async def _write(self, context: Any, reply: Any) -> None:
        async with self._writing:
            await context.write(self.message(responses=[reply]))

    def round_of(self, request: Any) -> int | None:
        """Of a step; None of an open."""
        raise NotImplementedError

    def answer_to(self, request: Any, tokens: list[int]) -> Any:
        """The answer to a request of a sequence that holds tokens."""
        raise NotImplementedError


class FakeDrafter(Fake, drafter_pb2_grpc.DrafterServiceServicer):
    """Drafts the number that follows, as certain rows.

    Attributes:
        pure: what it says of them.
    """

    def __init__(self, **changes: Any) -> None:
        super().__init__(**changes)
        self.pure = True

    message = drafter_pb2.DraftResponse
    answer = drafter_pb2.SequenceResponse

    async def Draft(self, request_iterator: object, context: Any) -> None:  # type: ignore[override]
        await self.serve(context)

    def round_of(self, request: Any) -> int | None:
        return request.draft.round if request.HasField("draft") else None

    def answer_to(self, request: Any, tokens: list[int]) -> Any:
        opening = request.HasField("open")
        return self._open(request, tokens) if opening else self._draft(request, tokens)

    def _open(
        self, request: drafter_pb2.SequenceRequest, tokens: list[int]
    ) -> drafter_pb2.SequenceResponse:
        tokens += request.open.token_ids
        return drafter_pb2.SequenceResponse(opened=drafter_pb2.OpenedSequence())

    def _draft(
        self, request: drafter_pb2.SequenceRequest, tokens: list[int]
    ) -> drafter_pb2.SequenceResponse:
        step = request.draft
        assert step.position == len(tokens)
        tokens += step.new_token_ids
        drafted = [(tokens[-1] + 1 + i) % VOCAB_SIZE for i in range(step.gamma)]
        draft = common_pb2.Draft(token_ids=drafted)
        return drafter_pb2.SequenceResponse(
            drafted=drafter_pb2.DraftedStep(round=step.round, position=len(tokens), draft=draft)
        )

    async def GetModelInfo(
        self, request: drafter_pb2.GetModelInfoRequest, context: Any
    ) -> drafter_pb2.GetModelInfoResponse:
        return drafter_pb2.GetModelInfoResponse(
            info=self.info,
            drafter="fake",
            draft_support=50,
            shape=common_pb2.DRAFT_SHAPE_CHAIN,
            pure=self.pure,
        )


class FakeTarget(Fake, target_pb2_grpc.TargetServiceServicer):
    """Counts upwards, but says 0 after each multiple of `wraps`.

    Attributes:
        verifiers: that it claims to know.
        tokenizer_json: that it hands out; without one it says so.
        openings: what its sequences were opened with.
    """

    def __init__(self, wraps: int = 7, **changes: Any) -> None:
        super().__init__(**changes)
        self.wraps = wraps
        self.verifiers = ["block", "greedy_block", "token"]
        self.tokenizer_json = b""
        self.openings: list[target_pb2.OpenSequence] = []

    def follow(self, token: int) -> int:
        return 0 if token and token % self.wraps == 0 else token + 1

    def text(self, count: int, last: int = 1) -> list[int]:
        """The tokens that follow one."""
        tokens = [last]
        while len(tokens) <= count:
            tokens.append(self.follow(tokens[-1]))
        return tokens[1:]

    message = target_pb2.VerifyResponse
    answer = target_pb2.SequenceResponse

    async def Verify(self, request_iterator: object, context: Any) -> None:  # type: ignore[override]
        await self.serve(context)

    def round_of(self, request: Any) -> int | None:
        return request.verify.round if request.HasField("verify") else None

    def answer_to(self, request: Any, tokens: list[int]) -> Any:
        opening = request.HasField("open")
        return self._open(request, tokens) if opening else self._verify(request, tokens)

    def _open(
        self, request: target_pb2.SequenceRequest, tokens: list[int]
    ) -> target_pb2.SequenceResponse:
        tokens += request.open.token_ids
        self.openings.append(request.open)
        if request.open.carry.levels:
            return target_pb2.SequenceResponse(opened=target_pb2.OpenedSequence())
        tokens.append(self.follow(tokens[-1]))
        return target_pb2.SequenceResponse(opened=target_pb2.OpenedSequence(token_id=tokens[-1]))

    def _verify(
        self, request: target_pb2.SequenceRequest, tokens: list[int]
    ) -> target_pb2.SequenceResponse:
        step = request.verify
        assert step.position == len(tokens)
        accepted = 0
        for token in step.draft.token_ids:
            if token != self.follow(tokens[-1]):
                break
            tokens.append(token)
            accepted += 1
        tokens.append(self.follow(tokens[-1]))
        return target_pb2.SequenceResponse(
            verdict=target_pb2.Verdict(
                round=step.round,
                position=len(tokens),
                num_accepted=accepted,
                place=accepted,
                next_token_id=tokens[-1],
                overlaps=[1.0] * len(step.draft.token_ids),
            )
        )

    async def GetModelInfo(
        self, request: target_pb2.GetModelInfoRequest, context: Any
    ) -> target_pb2.GetModelInfoResponse:
        return target_pb2.GetModelInfoResponse(
            info=self.info, verifiers=[RULES[name] for name in self.verifiers]
        )

    async def GetTokenizer(
        self, request: target_pb2.GetTokenizerRequest, context: Any
    ) -> target_pb2.GetTokenizerResponse:
        if not self.tokenizer_json:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no tokenizer")
        return target_pb2.GetTokenizerResponse(tokenizer_json=self.tokenizer_json)


async def _serve(stack: AsyncExitStack, fake: FakeDrafter | FakeTarget) -> str:
    """The address of a fake on a free port, until the stack ends."""
    server = grpc.aio.server()
    if isinstance(fake, FakeDrafter):
        drafter_pb2_grpc.add_DrafterServiceServicer_to_server(fake, server)
    else:
        target_pb2_grpc.add_TargetServiceServicer_to_server(fake, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    stack.push_async_callback(server.stop, 0)
    return address


@asynccontextmanager
async def serve_fakes(
    *fakes: FakeDrafter | FakeTarget, **settings: Any
) -> AsyncIterator[OrchestratorSettings]:
    """Fakes on free ports, and the settings of an orchestrator over them."""
    async with AsyncExitStack() as stack:
        addresses = [(fake, await _serve(stack, fake)) for fake in fakes]
        peers = {
            "drafters": tuple(at for fake, at in addresses if isinstance(fake, FakeDrafter)),
            "targets": tuple(at for fake, at in addresses if isinstance(fake, FakeTarget)),
        }
        yield OrchestratorSettings(**(peers | settings))


@asynccontextmanager
async def orchestrate(
    *fakes: FakeDrafter | FakeTarget,
    ready: bool = True,
    channel_options: Any = (),
    **settings: Any,
) -> AsyncIterator[Any]:
    """A stub of an orchestrator over fakes."""
    async with serve_fakes(*fakes, **settings) as chosen:
        server = RunningServer("127.0.0.1:0", make_service(chosen))
        await server.start()
        try:
            if ready:
                await server.ready()
            address = f"127.0.0.1:{server.port}"
            async with grpc.aio.insecure_channel(address, options=channel_options) as channel:
                yield orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        finally:
            await server.stop(1.0)


def generation(**changes: Any) -> pb.Generation:
    fields: dict[str, Any] = {
        "prompt_token_ids": [1],
        "stopping": pb.Stopping(max_new_tokens=20),
        "speculation": pb.Speculation(gamma=4),
    }
    return pb.Generation(**(fields | changes))


def request(**changes: Any) -> pb.CompleteRequest:
    return pb.CompleteRequest(generation=generation(**changes))

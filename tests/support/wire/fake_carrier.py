"""Base of fake services without a model: carries their sequences over streams. Free of torch."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc

from tandem.common.v1 import common_pb2
from tandem.rpc.health import Health

VOCAB_SIZE = 100


class Ended(Exception):
    """Ends a sequence, or a stream, of a fake."""


class FakeContext:
    """Lets tests interfere with a sequence of a fake, and with its stream."""

    def __init__(
        self, over: asyncio.Future[None], end: Callable[[grpc.StatusCode, str], Awaitable[None]]
    ) -> None:
        self._over = over
        self._end = end
        self._ending: asyncio.Task[None] | None = None

    def end_later(self, code: grpc.StatusCode, sentence: str) -> None:
        """End the sequence soon after the answer to its request."""

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

    async def give_back(self) -> None:
        """End the sequence for its memory."""
        raise Ended(grpc.StatusCode.ABORTED, "older sequences needed the memory", True)


async def _go_on(round_: int | None, context: FakeContext) -> None:
    """Nothing happens."""


def _leave(reply: Any) -> None:
    """Nothing is changed."""


class Fake(ABC):
    """Base of both fake services: sequences that share a stream, and deliberate faults.

    Attributes:
        opened: sequences opened so far, without probes.
        ended: sequences ended so far, without probes.
        streams: streams so far.
        interfere: called before each answer, with its round (None for an open) and a context; may
            raise, abort or hang.
        alter: called with each answer; may change it.
        probed: sequences so far that were an orchestrator's probes.
        passes_trials: whether probes are answered; always without interference.
        health: of its server.
    """

    message: Any
    answer: Any
    health: Health

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
            "fingerprint": "fake",
        }
        self.info = common_pb2.ModelInfo(**(fields | changes))
        self.opened = self.ended = self.streams = self.tried = 0
        self.passes_trials = True
        self.interfere: Callable[[int | None, FakeContext], Awaitable[None]] = _go_on
        self.alter: Callable[[Any], None] = _leave
        self._writing = asyncio.Lock()

    async def serve(self, context: Any) -> None:
        """Answer the sequences of a stream independently of each other."""
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
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                for request in message.requests:
                    await self._hear(request, open_, context, over)
        finally:
            if not over.done():
                over.set_result(None)

    async def _hear(
        self, request: Any, open_: dict[int, Any], context: Any, over: asyncio.Future[None]
    ) -> None:
        number = request.sequence
        if request.HasField("close"):
            if number in open_:  # else its open was lost on the way
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
        first = await inbox.get()
        inbox.put_nowait(first)
        if first.open.request_id == "trial":
            await self._answer_probe(number, inbox, context)
            return
        self.opened += 1

        async def end(code: grpc.StatusCode, sentence: str, given_back: bool = False) -> None:
            ended = common_pb2.SequenceEnd(
                code=code.value[0], sentence=sentence, given_back=given_back
            )
            await self._say(context, number, ended=ended)

        try:
            while True:
                for request in self.steps_of(await inbox.get(), first, last, tokens):
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

    async def _answer_probe(self, number: int, inbox: asyncio.Queue[Any], context: Any) -> None:
        """Answer all requests of a probe, without interference."""
        tokens: list[int] = []
        self.tried += 1
        while True:
            request = await inbox.get()
            if self.passes_trials:
                reply = self.answer_to(request, tokens)
                reply.sequence = number
                await self._write(context, reply)

    async def _say(self, context: Any, number: int, **result: Any) -> None:
        await self._write(context, self.answer(sequence=number, **result))

    async def _write(self, context: Any, reply: Any) -> None:
        # A close may cancel a sequence while its answer is being written; the stream must survive.
        await asyncio.shield(self._write_whole(context, reply))

    async def _write_whole(self, context: Any, reply: Any) -> None:
        async with self._writing:
            await context.write(self.message(responses=[reply]))

    def steps_of(self, request: Any, opening: Any, last: int, tokens: list[int]) -> Iterator[Any]:
        """What a request asks for, one answer at a time; `tokens` grow in between."""
        yield request

    @abstractmethod
    def round_of(self, request: Any) -> int | None:
        """The round of a step; None for an open."""

    @abstractmethod
    def answer_to(self, request: Any, tokens: list[int]) -> Any:
        """The answer to a request of a sequence that holds tokens."""

"""The carrier of sequences' messages, on the side of a service: a stream has many of them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import grpc

from tandem.errors import (
    Exhausted,
    IdleTimeout,
    InvalidRequest,
    TandemError,
    Unavailable,
    WrongState,
)
from tandem.rpc.status import end_of
from tandem.rpc.streams.conversation import Conversation
from tandem.rpc.streams.decoding import Malformed
from tandem.rpc.streams.entries import StepRequest, StepResponse
from tandem.rpc.streams.outbox import Outbox
from tandem.rpc.streams.sequence import ServedSequence

# In one message.
MAX_REQUESTS = 1024
# Answers that wait for a caller who does not read them, before no more requests are read.
_MAX_WAITING_BYTES = 4 << 20
# How long a stream is new: its first request is after it on the wire, if there is to be any.
_NEW_SECONDS = 1.0
# gRPC sends no status while a write is on its way, and a caller would wait for it for ever. A write
# that is not read takes for ever itself.
_LAST_WRITE_SECONDS = 1.0
# That a stream is read later for each of its requests that is refused for what it says: who sends
# such ones without end leaves the others most of the service's time.
_FAULT_SECONDS = 0.001
_STOPPING = "the service is stopping; try another replica"

Q = TypeVar("Q", bound=StepRequest)
R = TypeVar("R", bound=StepResponse)


@dataclass(frozen=True)
class StreamLimits:
    """Bounds on streams.

    Attributes:
        idle_seconds: of a sequence without a request, or of answers that are not read.
        full_idle_seconds: of a sequence without a request, where another one waits for its place.
        empty_seconds: of a stream without a sequence.
        max_empty: streams without a sequence; one more is refused.
    """

    idle_seconds: float
    full_idle_seconds: float
    empty_seconds: float
    max_empty: int


class Streams(Generic[Q, R]):
    """The streams of a service.

    Args:
        span: name of the span of a request that failed.
        limits: on each stream, and on all that are empty.
        message: the streams' messages, lists of `responses`.
        answer: what they are lists of.
    """

    def __init__(
        self, span: str, limits: StreamLimits, message: Callable[..., Any], answer: Callable[..., R]
    ) -> None:
        self.span = span
        self.limits = limits
        self.answer = answer
        self.draining = False
        self._message = message
        self._running: set[_Stream[Q, R]] = set()

    async def run(
        self,
        context: grpc.aio.ServicerContext[Any, Any],
        make: Callable[[], ServedSequence[Q, R]],
    ) -> None:
        """Carry sequences until the caller ends the stream. What it leaves open is freed.

        Args:
            context: of the stream.
            make: a fresh sequence.

        Raises:
            TandemError: why the stream, and not only a sequence of it, is ended.
        """
        self._make_room_for_one()
        stream = _Stream(self, context, make)
        self._running.add(stream)
        try:
            await stream.serve()
        finally:
            self._running.discard(stream)

    def _make_room_for_one(self) -> None:
        """Have a stream without a sequence end, where there are as many as there may be.

        Raises:
            Exhausted: all of them are new.
        """
        empty = [stream for stream in self._running if stream.is_empty]
        if len(empty) < self.limits.max_empty:
            return
        # One that is kept for later: its caller opens another then.
        spare = next((stream for stream in empty if stream.is_spare), None)
        if spare is not None:
            spare.note_drain()
            return
        oldest = min(empty, key=lambda stream: stream.empty_since)
        seconds = time.monotonic() - oldest.empty_since
        if seconds < _NEW_SECONDS:
            raise Exhausted(f"{len(empty)} streams have no sequence; try another replica, or later")
        oldest.end_empty(seconds)

    def make_room(self) -> None:
        """Have the sequence end that has been silent for the longest, if it was for long: another
        one waits for its place. Those that wait for an answer are not silent."""
        conversations = (one for stream in self._running for one in stream.conversations)
        longest = min(conversations, key=lambda one: one.silent_since, default=None)
        if longest is None:
            return
        if time.monotonic() - longest.silent_since >= self.limits.full_idle_seconds:
            longest.give_way()

    def encode(self, answer: R) -> bytes:
        """An answer as a message of its own."""
        encoded: bytes = self._message(responses=[answer]).SerializeToString()
        return encoded

    def drain(self) -> None:
        """Refuse what opens from now on, and end each stream with its last sequence."""
        self.draining = True
        for stream in self._running:
            stream.note_drain()


class _Stream(Generic[Q, R]):
    """One stream of a service."""

    def __init__(
        self,
        streams: Streams[Q, R],
        context: grpc.aio.ServicerContext[Any, Any],
        make: Callable[[], ServedSequence[Q, R]],
    ) -> None:
        self._streams = streams
        self._context = context
        self._make = make
        self._outbox = Outbox()
        self._open: dict[int, Conversation[Q, R]] = {}
        self._last = 0
        self._faults = 0
        self._leaving = False
        loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = loop.create_future()
        self._empty: asyncio.TimerHandle | None = None
        self.empty_since = math.inf
        self._note_empty()

    @property
    def is_empty(self) -> bool:
        return not self._open and not self._over.done()

    @property
    def conversations(self) -> Iterator[Conversation[Q, R]]:
        yield from self._open.values()

    @property
    def is_spare(self) -> bool:
        """Whether it has had a sequence, and none is left."""
        return self._last > 0 and self.is_empty and not self._leaving

    async def serve(self) -> None:
        """Read and write until either ends, or nothing is left to do."""
        reading, writing = (asyncio.create_task(work) for work in (self._read(), self._write()))
        try:
            await self._over
        finally:
            if self._empty is not None:
                self._empty.cancel()
            for conversation in self._open.values():
                conversation.cancel()
            reading.cancel()
            self._outbox.abandon()
            await asyncio.wait([writing], timeout=_LAST_WRITE_SECONDS)
            writing.cancel()

    async def _read(self) -> None:
        try:
            while (message := await self._context.read()) is not grpc.aio.EOF:
                if isinstance(message, Malformed):
                    raise message.error()
                if len(message.requests) > MAX_REQUESTS:
                    raise InvalidRequest(
                        f"requests may hold {MAX_REQUESTS} here, got {len(message.requests)}"
                    )
                for request in message.requests:
                    self._hand_on(request)
                await self._outbox.room(MAX_REQUESTS, _MAX_WAITING_BYTES)
                if faults := self._faults:
                    self._faults = 0
                    await asyncio.sleep(faults * _FAULT_SECONDS)
            # A half-close and a cancel look alike here: whatever is open is abandoned.
            self._end(None)
        except Exception as error:
            self._end(error)

    async def _write(self) -> None:
        seconds = self._streams.limits.idle_seconds
        late = IdleTimeout(f"answers were not read for {seconds:g} s")
        try:
            await self._outbox.pour(self._context.write, seconds, partial(self._end, late))
            self._end(Unavailable(_STOPPING))
        except Exception as error:
            self._end(error)

    def _end(self, error: Exception | None) -> None:
        if self._over.done():
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)

    def _hand_on(self, request: Q) -> None:
        """Give a request to its sequence, which may be a new one."""
        number = request.sequence
        if (conversation := self._open.get(number)) is not None:
            conversation.hear(request)
        elif number <= self._last:
            if request.WhichOneof("step") == "close":  # it may have crossed our own end
                self._say_end(number, None)
            else:
                sentence = f"sequence {number} is over, or not above {self._last}, the last opened"
                self._say_end(number, WrongState(sentence))
        elif self._streams.draining:
            self._say_end(number, Unavailable(_STOPPING))
        else:
            self._begin(number, request)

    def _begin(self, number: int, request: Q) -> None:
        self._last = number
        if self._empty is not None:
            self._empty.cancel()
        self._open[number] = Conversation(
            self._make(),
            request,
            self._streams.span,
            self._streams.limits.idle_seconds,
            partial(self._say, number),
            partial(self._forget, number),
        )

    def _say(self, number: int, answer: R, written: Callable[[], None] | None = None) -> None:
        answer.sequence = number
        self._outbox.put(self._streams.encode(answer), written=written)

    def _say_end(self, number: int, error: TandemError | None) -> None:
        self._faults += isinstance(error, InvalidRequest | WrongState)
        self._say(number, self._streams.answer(ended=end_of(error)))

    def _forget(self, number: int, error: TandemError | None) -> None:
        """A sequence is over; it may say so itself, or be told."""
        if self._open.pop(number, None) is not None:
            self._say_end(number, error)
            if not self._open:
                self._note_empty()

    def _note_empty(self) -> None:
        """Let the stream be without a sequence for a while only."""
        seconds = self._streams.limits.empty_seconds
        self.empty_since = time.monotonic()
        self._empty = asyncio.get_running_loop().call_later(seconds, self.end_empty, seconds)
        if self._streams.draining:
            self.note_drain()

    def end_empty(self, seconds: float) -> None:
        """End for having had no sequence for so long."""
        late = IdleTimeout(f"no sequence for {seconds:.3g} s; open the stream again if needed")
        self._end(late)

    def note_drain(self) -> None:
        """End with the last sequence, which may be over."""
        self._leaving = True
        if not self._open:
            self._outbox.finish()

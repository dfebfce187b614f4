"""Server side of a stream that is one sequence: open, steps, close."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import grpc
import structlog
from opentelemetry.util.types import AttributeValue

from tandem.errors import IdleTimeout, InvalidRequest, WrongState
from tandem.telemetry.tracing import StepSpans


class StepMessage(Protocol):
    """A request with a `step` oneof, of which one branch is `open` and one `close`."""

    traceparent: str

    def WhichOneof(self, oneof_group: Any, /) -> Any:
        """The branch that is set."""


Q = TypeVar("Q", bound=StepMessage)
R = TypeVar("R")


@dataclass
class Progress:
    """How far a sequence is, and what may come next.

    Attributes:
        length: tokens held, prompt and emitted.
        last_round: the last round's number.
    """

    length: int
    last_round: int

    def check(self, round_: int, position: int) -> None:
        """Refuse a step that does not follow from the last.

        Raises:
            WrongState: the round is not new, or the position is not ours.
        """
        if round_ <= self.last_round:
            raise WrongState(f"round {round_} is not after round {self.last_round}")
        if position != self.length:
            raise WrongState(f"position {position} does not match the {self.length} tokens held")


@dataclass
class StepReply(Generic[R]):
    """What a step answers, and what its span says.

    Attributes:
        message: the response.
        span: the span's name.
        stages: child spans, name to nanoseconds, in order.
        attributes: of the span.
        afterwards: what can be done while the peer is busy with the answer.
    """

    message: R
    span: str
    stages: Mapping[str, int]
    attributes: dict[str, AttributeValue] = field(default_factory=dict)
    afterwards: Callable[[], None] | None = None


class SequenceStream(ABC, Generic[Q, R]):
    """Runs one stream. The sequence is freed when the stream ends, however it ends."""

    def __init__(
        self, context: grpc.aio.ServicerContext[Q, R], span: str, idle_seconds: float
    ) -> None:
        self._context = context
        self._span = span
        self._idle_seconds = idle_seconds
        self._opened = False

    @abstractmethod
    async def open(self, message: Q) -> StepReply[R]:
        """Open the sequence."""

    @abstractmethod
    async def step(self, message: Q) -> StepReply[R]:
        """Do one step of an open sequence."""

    @abstractmethod
    def release(self) -> None:
        """Free the sequence. Must not wait: a cancelled handler may not come back."""

    async def run(self) -> None:
        """Answer messages until Close, an error, or the end of the stream."""
        try:
            while (message := await self._next()) is not None:
                kind = message.WhichOneof("step")
                if kind == "close":
                    return
                await self._answer(kind, message)
        finally:
            self.release()

    async def _next(self) -> Q | None:
        """The next message; None at the end of the stream.

        Without a Close before it, the end is an abort: `read` cannot tell a half-close from a
        cancel. Both free the sequence.
        """
        try:
            async with asyncio.timeout(self._idle_seconds):
                message = await self._context.read()
        except TimeoutError:
            raise IdleTimeout(
                f"no message for {self._idle_seconds:g} s; open the sequence again if needed"
            ) from None
        return None if message is grpc.aio.EOF else message  # type: ignore[comparison-overlap]

    async def _answer(self, kind: str | None, message: Q) -> None:
        spans = StepSpans(message.traceparent)
        try:
            reply = await self._handle(kind, message)
            await self._write(reply.message)
        except BaseException as error:
            spans.record(self._span, {}, self._log_context(), error)
            raise
        spans.record(reply.span, reply.stages, {**self._log_context(), **reply.attributes})
        if reply.afterwards is not None:
            reply.afterwards()

    async def _write(self, message: R) -> None:
        """Answer; a peer that does not read must not hold its sequence."""
        try:
            async with asyncio.timeout(self._idle_seconds):
                await self._context.write(message)
        except TimeoutError:
            raise IdleTimeout(f"an answer was not read for {self._idle_seconds:g} s") from None

    async def _handle(self, kind: str | None, message: Q) -> StepReply[R]:
        if kind is None:
            raise InvalidRequest("step must be set, to open, a step, or close")
        if kind != "open":
            if not self._opened:
                raise WrongState("the first message must be open")
            return await self.step(message)
        if self._opened:
            raise WrongState("the sequence is already open")
        self._opened = True
        return await self.open(message)

    def _log_context(self) -> dict[str, AttributeValue]:
        context = structlog.contextvars.get_contextvars()
        return {"tandem.request_id": str(context.get("request_id", ""))}

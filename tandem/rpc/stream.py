"""The carrier of a sequence's messages: one stream is one sequence, and lives as long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from tandem.errors import Exhausted, IdleTimeout
from tandem.rpc.decoding import Malformed
from tandem.rpc.patience import Patience
from tandem.rpc.sequence import ServedSequence, State, StepMessage
from tandem.telemetry.tracing import StepSpans

Q = TypeVar("Q", bound=StepMessage)
R = TypeVar("R")


@dataclass(frozen=True)
class StreamLimits:
    """Bounds on streams.

    Attributes:
        idle_seconds: without a message, or with an answer that is not read.
        open_seconds: until the first message.
        max_new: streams that are not open yet; one more is refused.
    """

    idle_seconds: float
    open_seconds: float
    max_new: int


class Streams:
    """Runs the streams of a service.

    Args:
        span: name of the span of a message that failed.
        limits: on each stream, and on all that are new.
    """

    def __init__(self, span: str, limits: StreamLimits) -> None:
        self._span = span
        self._limits = limits
        self._new = 0

    async def run(
        self, context: grpc.aio.ServicerContext[Q, R], sequence: ServedSequence[Q, R]
    ) -> None:
        """Answer messages until close, an error, or the end of the stream.

        The sequence is released when the stream ends, however it ends. An end without a close
        before it is an abort: `read` cannot tell a half-close from a cancel.
        """
        patience = Patience()
        try:
            with self._counted():
                message = await self._read(context, patience, self._limits.open_seconds)
            while message is not None:
                await self._answer(context, patience, sequence, message)
                if sequence.state is State.CLOSED:
                    return
                message = await self._read(context, patience, self._limits.idle_seconds)
        finally:
            patience.close()
            sequence.release()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count a stream while it is new."""
        if self._new >= self._limits.max_new:
            raise Exhausted(
                f"{self._new} streams are new and not open yet; try another replica, or later"
            )
        self._new += 1
        try:
            yield
        finally:
            self._new -= 1

    async def _read(
        self, context: grpc.aio.ServicerContext[Q, R], patience: Patience, seconds: float
    ) -> Q | None:
        """The next message; None at the end of the stream."""
        try:
            message: Any = await patience.bound(context.read(), seconds)
        except TimeoutError:
            raise IdleTimeout(
                f"no message for {seconds:g} s; open the sequence again if needed"
            ) from None
        if isinstance(message, Malformed):
            raise message.error()
        return None if message is grpc.aio.EOF else message

    async def _answer(
        self,
        context: grpc.aio.ServicerContext[Q, R],
        patience: Patience,
        sequence: ServedSequence[Q, R],
        message: Q,
    ) -> None:
        spans = StepSpans(message.traceparent) if message.traceparent else None
        try:
            reply = await sequence.handle(message)
        except BaseException as error:
            if spans is not None:
                spans.end()
                spans.record(self._span, {}, {"tandem.request_id": sequence.request_id}, error)
            raise
        if reply is None:
            return
        if spans is not None:  # before the caller can read it, or our span would outlast its own
            spans.end()
        seconds = self._limits.idle_seconds
        try:
            await patience.bound(context.write(reply.message), seconds)
        except TimeoutError:
            raise IdleTimeout(f"an answer was not read for {seconds:g} s") from None
        if spans is not None:
            attributes = {"tandem.request_id": sequence.request_id, **reply.attributes}
            spans.record(reply.span, reply.stages, attributes)

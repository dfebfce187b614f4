"""One sequence on a stream: its requests one by one, its idle limit, its end."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

import structlog

from tandem.errors import IdleTimeout, TandemError
from tandem.rpc.status import INTERNAL_ERROR
from tandem.rpc.streams.entries import StepRequest, StepResponse
from tandem.rpc.streams.patience import Patience
from tandem.rpc.streams.sequence import ServedSequence, State, StepReply
from tandem.telemetry.logs import bind_span
from tandem.telemetry.tracing.spans import caller_of
from tandem.telemetry.tracing.steps import StepSpan

_log = structlog.get_logger(__name__)

Q = TypeVar("Q", bound=StepRequest)
R = TypeVar("R", bound=StepResponse)


class Conversation(Generic[Q, R]):
    """Runs a sequence, from its first request on.

    Args:
        sequence: fresh; released when it is over.
        first: its first request.
        span: name of the span of a request that failed.
        idle_seconds: without a request.
        say: takes each answer, and what to call when it is on the wire.
        ended: called when the sequence is over by itself, with the reason if it failed.
    """

    def __init__(
        self,
        sequence: ServedSequence[Q, R],
        first: Q,
        span: str,
        idle_seconds: float,
        say: Callable[[R, Callable[[], None] | None], None],
        ended: Callable[[TandemError | None], None],
    ) -> None:
        self._sequence = sequence
        sequence.say = lambda answer: say(answer, None)
        self._span = span
        self._idle_seconds = idle_seconds
        self._say = say
        self._ended = ended
        self._request = first  # that is answered, or was last
        self._kept: Q | None = None  # until one that has no answer is dealt with
        self._next: asyncio.Future[Q] | None = None
        self._silent_since = math.inf
        self._task = asyncio.create_task(self._converse(first))

    def hear(self, request: Q) -> None:
        """Take the next request; close gives up what is being computed."""
        if self._next is not None and not self._next.done():
            self._request = request
            self._next.set_result(request)
            return
        if self._next is not None and (self._next.cancelled() or self._next.exception()):
            return  # it was silent for too long, which it is about to say
        error: TandemError | None = None
        if request.WhichOneof("step") != "close":
            if self._kept is None and self._sequence.unanswered(self._request):
                self._kept = request
                return
            try:
                self._sequence.more(request, self._request)
                return
            except TandemError as refused:
                error = refused
        self.cancel()
        self._ended(error)

    @property
    def silent_since(self) -> float:
        """When its wait for a request began, by time.monotonic(); infinite where none is on."""
        waits = self._next is not None and not self._next.done()
        return self._silent_since if waits else math.inf

    def give_way(self) -> None:
        """End it for its silence, since another sequence waits for its place."""
        if self._next is not None and not self._next.done():
            seconds = time.monotonic() - self._silent_since
            self._next.set_exception(
                IdleTimeout(
                    f"no request for {seconds:.1f} s, and others wait for the place; open the"
                    " sequence again if needed"
                )
            )

    def cancel(self) -> None:
        """Abandon the sequence; what it holds is free at once, and nothing more is said of it."""
        self._sequence.say = lambda answer: None
        self._task.cancel()

    async def _converse(self, request: Q) -> None:
        patience = Patience()
        error: TandemError | None = None
        try:
            await self._answer(request)
            while self._sequence.state is not State.CLOSED:
                await self._answer(await self._hear(patience))
        except TandemError as failure:
            error = failure
        except Exception:
            _log.exception("unexpected error in a sequence")
            error = TandemError(INTERNAL_ERROR)
        finally:
            patience.close()
            self._sequence.release()
        self._ended(error)

    async def _hear(self, patience: Patience) -> Q:
        if self._kept is not None:
            self._request, self._kept = self._kept, None
            return self._request
        self._next = asyncio.get_running_loop().create_future()
        self._silent_since = time.monotonic()
        seconds = self._idle_seconds
        try:
            return await patience.bound(self._next, seconds)
        except TimeoutError:
            raise IdleTimeout(
                f"no request for {seconds:g} s; open the sequence again if needed"
            ) from None

    async def _answer(self, request: Q) -> None:
        sequence = self._sequence
        caller = traced = caller_of(request.traceparent) if request.traceparent else None
        span = None
        if caller is not None and request.WhichOneof("step") != sequence.many_answers:
            span = StepSpan(caller)
            traced = span.context
            if sequence.state is State.NEW:
                bind_span(traced)  # once: it takes as long as all of a step's stamps
        try:
            reply = await sequence.handle(request, traced)
        except BaseException as error:
            if span is not None:
                span.end()
                attributes = {"tandem.request_id": sequence.request_id}
                span.record(self._span, None, attributes, error)
            raise
        if reply is None:
            return
        if span is not None:
            span.end()  # before the caller can read it, or our span would outlast its own
        told = partial(_told, span, reply, sequence.request_id)
        if reply.message is None:
            told()
        else:
            self._say(reply.message, told if span is not None else reply.behind)


def _told(span: StepSpan | None, reply: StepReply[Any], request_id: str) -> None:
    """A step's reply is on the wire: its span is written."""
    if span is not None:
        attributes = {"tandem.request_id": request_id, **reply.attributes}
        span.record(reply.step, reply.times, attributes)
    if reply.behind is not None:
        reply.behind()

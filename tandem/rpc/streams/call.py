"""A sequence as its caller sees it: a request and its answer or answers, until close or cancel."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from tandem.errors import Exhausted, OutOfTime, PeerFailure, TandemError, Unavailable
from tandem.rpc.status import ended_by_peer
from tandem.rpc.streams.entries import StepRequest, StepResponse
from tandem.rpc.streams.link import Link, SharedStream, broken
from tandem.rpc.streams.patience import Patience
from tandem.telemetry.tracing.spans import Span

# How long a peer may take to say goodbye.
CLOSE_SECONDS = 1.0


Q = TypeVar("Q", bound=StepRequest)
R = TypeVar("R", bound=StepResponse)


@contextmanager
def recorded(span: Span | None, request: StepRequest) -> Iterator[None]:
    """The exchange of a request as a span, which the peer's lies below; None records nothing."""
    if span is None:
        yield
        return
    request.traceparent = span.traceparent
    with span:
        yield


class SequenceCall(Generic[Q, R]):
    """One sequence on a peer.

    A peer may be of another release, or broken. Its answers are compared with what was asked
    before anything is emitted, since nothing emitted can be taken back.

    Args:
        link: to the peer.
        message: the stream's messages, lists of `requests`.
        close: the request that ends the sequence.
        remaining: seconds until the text's deadline; None for none.
        max_bytes: that the peer takes in a message; a larger one would end the whole stream.
    """

    def __init__(
        self,
        link: Link[R],
        message: Callable[..., Any],
        close: Q,
        remaining: float | None,
        max_bytes: int,
    ) -> None:
        self._link = link
        self._message = message
        self._close_request = close
        self._deadline = None if remaining is None else time.monotonic() + remaining
        self._max_bytes = max_bytes
        self._patience = Patience()
        self._stream: SharedStream[R] | None = None
        self._number = 0

    @property
    def address(self) -> str:
        """Of the peer."""
        return self._link.address

    async def open(self, request: Q, kind: str, seconds: float, span: Span | None = None) -> R:
        """Send the first request and wait for its answer; see `ask`.

        A stream that others use already may lead to a peer that is stopping, or end while our
        request is on its way. Nothing was emitted of it then, so it is sent on a younger one.
        """
        with recorded(span, request):
            stream = self._join()
            try:
                return await self.ask(request, kind, seconds)
            except Unavailable:
                if self._number == 1 or self._stream is None:
                    raise
            stream.retire()
            self._leave()
            self._join(after=stream.number)
            return await self.ask(request, kind, seconds)

    def _join(self, after: int = 0) -> SharedStream[R]:
        stream = self._stream = self._link.join(after)
        self._number = stream.enter()
        return stream

    async def ask(self, request: Q, kind: str, seconds: float, span: Span | None = None) -> R:
        """Send a request and wait for its answer.

        Args:
            request: of a sequence that has joined a stream.
            kind: of the answer.
            seconds: to wait.
            span: of the exchange, where it is traced; ended with it.

        Raises:
            Unavailable: no answer in time.
            OutOfTime: the text's deadline came first.
            TandemError: what the peer ended the sequence with means, or the answer is of another
                kind.
        """
        with recorded(span, request):
            self.tell(request)
            return await self.hear(kind, seconds)

    def tell(self, request: Q, answers: int = 1) -> None:
        """Send a request with a known number of answers, each of which is to be heard.

        Raises:
            TandemError: the sequence is over, or the request is larger than the peer takes.
        """
        stream = self._joined()
        message = self._encoded(request)
        if len(message) > self._max_bytes:
            raise Exhausted(
                f"a request of {len(message)} bytes is more than the {self._link.role} takes"
                f" ({self._max_bytes}): raise its MAX_MESSAGE_MIB"
            )
        stream.send(self._number, message, answers)

    async def hear(self, kind: str, seconds: float) -> R:
        """Wait for the next answer; see `ask`."""
        left = seconds if self._deadline is None else self._deadline - time.monotonic()
        try:
            answer = await self._next_answer(min(seconds, left))
        except TimeoutError:
            late = left >= seconds
            if late and self._stream is not None:
                self._stream.retire()  # which may be what does not answer
            self.cancel()
            raise self._late(seconds if late else None) from None
        if (got := answer.WhichOneof("result")) == "ended":
            raise ended_by_peer(self._link.role, self._link.address, answer.ended)
        if got != kind:
            raise self.broken(f"result must be {kind}, got {got}")
        return answer

    def heard(self) -> bool:
        """Whether the next answer is there; it is heard without a wait."""
        return self._joined().has_answer(self._number)

    def _joined(self) -> SharedStream[R]:
        if self._stream is None:
            raise self.broken("the sequence is over")
        return self._stream

    async def _next_answer(self, seconds: float) -> R:
        answer = self._joined().answer(self._number)
        return answer.result() if answer.done() else await self._patience.bound(answer, seconds)

    def _encoded(self, request: Q) -> bytes:
        request.sequence = self._number
        encoded: bytes = self._message(requests=[request]).SerializeToString()
        return encoded

    def _late(self, seconds: float | None) -> TandemError:
        role = self._link.role
        error: TandemError = (
            OutOfTime(f"the {role} did not answer before the deadline")
            if seconds is None
            else Unavailable(f"the {role} did not answer within {seconds:g} s; try again")
        )
        error.add_note(f"{role} {self._link.address}")
        return error

    def expect(self, field: str, value: int, least: int, most: int) -> None:
        """Refuse an answer that does not fit what was asked.

        Raises:
            PeerFailure: the value is out of its bounds.
        """
        if not least <= value <= most:
            bounds = str(least) if least == most else f"{least}..{most}"
            raise self.broken(f"{field} must be {bounds}, got {value}")

    def broken(self, sentence: str) -> PeerFailure:
        """The error of an answer that no peer may give."""
        return broken(self._link, sentence)

    async def close(self) -> None:
        """Say goodbye and wait for the end; a peer that is gone already is fine."""
        if self._stream is None:
            return
        try:
            self.tell(self._close_request)
            # Rounds that were asked for ahead may still come.
            while (await self._next_answer(CLOSE_SECONDS)).WhichOneof("result") != "ended":
                pass
        except TimeoutError:
            self._stream.retire()  # it may be what does not answer: no other call waits on it
        except TandemError:
            pass
        else:
            self._leave()
        finally:
            self.cancel()  # where it was not heard, it may not even be on its way

    def cancel(self) -> None:
        """Abort the sequence; the peer frees it. Never waits; harmless after the end."""
        self._leave(self._encoded(self._close_request))

    def _leave(self, close: bytes = b"") -> None:
        self._patience.close()
        if self._stream is not None:
            self._stream.leave(self._number, close)
            self._stream = None

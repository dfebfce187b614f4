"""All that is kept of one text: its times, its counts, its spans, and what metrics hear of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from opentelemetry.trace import SpanKind
from opentelemetry.util.types import AttributeValue

from tandem.errors import TandemError
from tandem.peers.text.measures import TextCounts, TextTimes
from tandem.peers.text.metrics import RequestEnd, RequestMetrics
from tandem.peers.text.values import FinishReason, Round
from tandem.rpc.status import code_of
from tandem.speculation.prepared_outcome import PreparedOutcome
from tandem.telemetry.harmless import harmless
from tandem.telemetry.logs import bind_span
from tandem.telemetry.tracing.ids import SpanIds
from tandem.telemetry.tracing.spans import SHORTEST_NS, Span, head

_NOTHING: AbstractContextManager[None] = nullcontext()


class TextSpans:
    """The span of a text, and of what is done for it, one below the other.

    Args:
        metadata: of the call, which may name the caller's span; None records nothing.
    """

    def __init__(self, metadata: Mapping[str, str] | None) -> None:
        self._text = None if metadata is None else head("generate", metadata)
        self._innermost = self._text
        if self._text is not None:
            bind_span(self._text.context)

    @property
    def context(self) -> SpanIds | None:
        """The text's; None where nothing is recorded."""
        return None if self._text is None else self._text.context

    @property
    def traceparent(self) -> str:
        """The text's span, for messages; empty where nothing is recorded."""
        return "" if self._text is None else self._text.traceparent

    def describe(self, attributes: Mapping[str, AttributeValue]) -> None:
        """Attributes of the span that is open now."""
        if self._innermost is not None:
            self._innermost.attributes.update(attributes)

    def note(self, event: str) -> None:
        """Something that happened to the text, now."""
        if self._text is not None:
            self._text.event(event)

    def child(self, name: str) -> AbstractContextManager[None]:
        """A span for the block, below the one that is open now."""
        return _NOTHING if self._innermost is None else self._child(name, self._innermost)

    @contextmanager
    def _child(self, name: str, outer: Span) -> Iterator[None]:
        try:
            with Span(name, outer.context) as self._innermost:
                yield
        finally:
            self._innermost = outer

    @contextmanager
    def brief(self, name: str) -> Iterator[None]:
        """The same for a block that takes no calls: no span where it is short."""
        if self._innermost is None:
            yield
            return
        started_ns = time.time_ns()
        try:
            yield
        finally:
            if time.time_ns() - started_ns >= SHORTEST_NS:
                Span(name, self._innermost.context, start_ns=started_ns).end()

    def call(self, step: str, method: str, address: str, of_text: bool = False) -> Span | None:
        """The span of an exchange with a service; None where nothing is recorded.

        Args:
            step: that it asks for.
            method: fully qualified, without the leading slash.
            address: of the peer.
            of_text: it lies below the text, and not below the span that is open now.
        """
        outer = self._text if of_text else self._innermost
        if outer is None:
            return None
        span = Span(f"call.{step}", outer.context, SpanKind.CLIENT)
        host, _, port = address.rpartition("/")[2].rpartition(":")
        span.attributes = {
            "rpc.system.name": "grpc",
            "rpc.method": method,
            "server.address": host.strip("[]") or address,
        }
        if port.isdecimal():
            span.attributes["server.port"] = int(port)
        return span

    def fail(self, error: BaseException) -> None:
        """Mark the text as failed."""
        if self._text is not None:
            self._text.fail(error)

    def end(self) -> None:
        """The text is over."""
        if self._text is not None:
            self._text.end()


# A passed deadline reaches us as a cancellation, and its two ends do not agree to the millisecond.
_DEADLINE_SLACK_SECONDS = 0.05


# Fronts that requests come by.
GRPC, HTTP = "grpc", "http"


class TextRecord:
    """The record of one text, from its request to its end.

    Attributes:
        times: where its wall time went, and what its services did meanwhile.
        counts: of what was drafted, kept and emitted.
        spans: of the text and of what is done for it.
        outcome: of the request, for the log.

    Args:
        spans: the text's; None for one that is not traced.
        metrics: that hear of it; None if they are not read.
        model: the target's name, for them.
        remaining: seconds until the caller's deadline, now; None for none.
        front: that the request came by, "grpc" or "http".
    """

    def __init__(
        self,
        spans: TextSpans | None = None,
        metrics: RequestMetrics | None = None,
        model: str = "",
        remaining: float | None = None,
        front: str = GRPC,
    ) -> None:
        self._front = front
        self.times = TextTimes()
        self.counts = TextCounts()
        self.spans = spans or TextSpans(None)
        self.outcome = "error"
        self._metrics = metrics
        self._model = model
        self._remaining = remaining
        self._prefill_tokens = self._draft_bytes = 0
        # Until it is known better: nothing ends a text in silence.
        self._status, self._finish_reason = "INTERNAL", ""

    @property
    def remaining(self) -> float | None:
        """Seconds until the caller's deadline, now; None for none."""
        if self._remaining is None:
            return None
        return max(self._remaining - self.times.elapsed_ns() / 1e9, 0.0)

    def stage(self, name: str, span: str = "") -> AbstractContextManager[None]:
        """Book the block's wall time to a stage.

        Args:
            name: one of `WAITS`.
            span: name of a span for the block, where it is long enough for one; empty for none.
        """
        if span and self.spans.context is not None:
            return self._traced_stage(name, span)
        return self.times.stage(name)

    @contextmanager
    def _traced_stage(self, name: str, span: str) -> Iterator[None]:
        with self.spans.brief(span), self.times.stage(name):
            yield

    def begin(self, prompt_tokens: int) -> None:
        """The request is valid, and its text begins."""
        if self._metrics is not None:
            with harmless:
                self._metrics.begin(prompt_tokens)

    def note_cached(self, role: str, tokens: int) -> None:
        """A sequence was opened.

        Args:
            role: "drafter" or "target".
            tokens: of its prompt, that were computed before.
        """
        if role in self.counts.cached_tokens:
            return  # the text moved, and may find itself
        self.counts.cached_tokens[role] = tokens
        if self._metrics is not None:
            with harmless:
                self._metrics.count_cached(role, tokens)

    def lose_drafter(self) -> None:
        """The text goes on without its drafter, or ends."""
        if self._metrics is not None:
            with harmless:
                self._metrics.lose_drafter()

    def note_given_back(self) -> None:
        """The text's target needed its memory, and the text goes on when there is room."""
        self.counts.given_back += 1
        self.spans.note("given_back")

    def note_prepared(self, outcome: PreparedOutcome, drafts: int, ready_ns: int = 0) -> None:
        """A round's draft may have been prepared.

        Args:
            outcome: what of it.
            drafts: that had been prepared for the round.
            ready_ns: how long the draft had been ready at the drafter when it was asked for.
        """
        self.spans.describe(
            {
                "tandem.prepared": outcome.value,
                "tandem.prepared.drafts": drafts,
                "tandem.prepared.ready_ms": round(ready_ns / 1e6, 3),
            }
        )
        if self._metrics is not None:
            with harmless:
                self._metrics.count_prepared(outcome)

    def commit(self, round_: Round) -> None:
        """A round was committed, and counted."""
        if self._metrics is not None:
            with harmless:
                self._tell_metrics(self._metrics, round_)

    def _tell_metrics(self, metrics: RequestMetrics, round_: Round) -> None:
        if self.times.prefill_tokens > self._prefill_tokens:
            self._prefill_tokens = self.times.prefill_tokens
            metrics.prefill()
            return
        draft_bytes = self.counts.draft_bytes - self._draft_bytes
        self._draft_bytes = self.counts.draft_bytes
        metrics.round(round_, self.counts.accepted[-1], draft_bytes)

    def deliver(self) -> None:
        """A round is with the client."""
        if not self.times.first_token_ns:
            self.times.first_token_ns = self.times.elapsed_ns()
            self.spans.note("first_token")

    def finish(self, reason: FinishReason) -> None:
        """The text came to its end, and the client has it."""
        self.outcome = reason.name
        self._status, self._finish_reason = "OK", reason.value

    def fail(self, error: BaseException) -> None:
        """The request ends with an error, or its client is gone."""
        # An iterator that is closed early has a client that left.
        self.outcome = "ABANDONED" if isinstance(error, GeneratorExit) else type(error).__name__
        self.spans.fail(error)
        self._finish_reason = ""
        if isinstance(error, TandemError):
            self._status = code_of(error).name
        elif isinstance(error, (GeneratorExit, asyncio.CancelledError)):
            late = self.times.elapsed_ns() / 1e9 + _DEADLINE_SLACK_SECONDS
            passed = self._remaining is not None and late >= self._remaining
            self._status = "DEADLINE_EXCEEDED" if passed else "CANCELLED"
        else:
            self._status = "INTERNAL"

    def end(self) -> None:
        """The request is over, once and for all."""
        if self._metrics is not None:
            end = RequestEnd(self._model, self._status, self._finish_reason, self._front)
            with harmless:
                self._metrics.end(end, self.times, self.counts, self.spans.context)
        self.spans.end()

"""The spans of one step in a service, and of the passes that served it.

Streams outlive their rounds, so the context of a round travels in its messages and not in
the stream's metadata. The official aio instrumentation has one span a stream, fails on
read/write handlers and never ends the span of a cancelled stream; these take its place.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from opentelemetry.trace import SpanContext, SpanKind
from opentelemetry.util.types import AttributeValue

from tandem.telemetry.spans import Span, below
from tandem.telemetry.stages import FORWARD, READ, REPLY, StageTimes, span_of

# A shorter wait or computation has no span of its own: it is a part of its step's.
_SHORTEST_NS = 10_000


class StepSpan:
    """A step's span and its stages', written after its reply is on the wire.

    Stamps cost nothing while the caller waits; the spans are made when it no longer does.

    Attributes:
        context: its ids.

    Args:
        caller: whose span the step is done for.
    """

    def __init__(self, caller: SpanContext) -> None:
        self.context = below(caller)
        self._caller = caller
        self._start_ns = time.time_ns()
        self._zero_ns = self._end_ns = time.perf_counter_ns()

    def end(self) -> None:
        """Stamp the end: when the reply is made, before the caller can read it."""
        self._end_ns = time.perf_counter_ns()

    def record(
        self,
        step: str,
        times: StageTimes | None,
        attributes: Mapping[str, AttributeValue],
        error: BaseException | None = None,
    ) -> None:
        """Write the step's span, with one child a stage, each when it happened.

        Args:
            step: "prefill", "draft" or "verify"; of a failed one, its span's name.
            times: with stamps; None of a step that failed.
            attributes: of the span.
            error: what the step ended with, if it failed.
        """
        span = self._span(step, self._caller, SpanKind.SERVER, self._zero_ns, self.context)
        span.attributes.update(attributes)
        if times is not None and times.stamps:
            first, last = times.stamps[0][1], times.stamps[-1][2]
            stamps = [(READ, self._zero_ns, first), *times.stamps, (REPLY, last, self._end_ns)]
            for stage, start_ns, end_ns in stamps:
                end_ns = min(end_ns, self._end_ns)
                if end_ns - start_ns < _SHORTEST_NS and stage != FORWARD:
                    continue
                child = self._span(span_of(step, stage), self.context, SpanKind.INTERNAL, start_ns)
                child.end(self._at(end_ns))
        if error is not None:
            span.fail(error)
        span.end(self._at(self._end_ns))

    def _span(
        self,
        name: str,
        parent: SpanContext,
        kind: SpanKind,
        start_ns: int,
        context: SpanContext | None = None,
    ) -> Span:
        return Span(name, parent, kind, start_ns=self._at(start_ns), context=context)

    def _at(self, stamp_ns: int) -> int:
        """A stamp of the monotonic clock, in the epoch."""
        return self._start_ns + stamp_ns - self._zero_ns


def record_pass(
    served: Sequence[SpanContext], start_ns: int, end_ns: int, sequences: int, tokens: int
) -> None:
    """Write a pass's span, which belongs to several traces: linked with the steps it served.

    Args:
        served: those of them that are traced; none writes nothing.
        start_ns: of time.perf_counter_ns().
        end_ns: the same.
        sequences: that shared the pass.
        tokens: new ones that it was fed.
    """
    if not served:
        return
    at_ns = time.time_ns() - time.perf_counter_ns()
    span = Span("pass", None, links=served, start_ns=at_ns + start_ns)
    span.attributes.update({"tandem.batch_size": sequences, "tandem.tokens": tokens})
    span.end(at_ns + end_ns)

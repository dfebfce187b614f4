"""The spans of one step in a service, and of the passes that served it.

Streams outlive their rounds, so the context of a round travels in its messages and not in
the stream's metadata. The official aio instrumentation has one span a stream, fails on
read/write handlers and never ends the span of a cancelled stream; these take its place.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from opentelemetry.trace import SpanKind
from opentelemetry.util.types import AttributeValue

from tandem.telemetry.stages import ENGINE_STAGES, FORWARD, READ, REPLY, StageTimes, span_of
from tandem.telemetry.tracing.ids import SpanIds
from tandem.telemetry.tracing.spans import SHORTEST_NS, Span, below, write


class StepSpan:
    """A step's span and its stages', written after its reply is on the wire.

    Stamps cost nothing while the caller waits; the spans are made when it no longer does.

    Attributes:
        context: its ids.

    Args:
        caller: whose span the step is done for.
    """

    def __init__(self, caller: SpanIds) -> None:
        self.context = below(caller)
        self._caller = caller
        self._start_ns = time.time_ns()
        self._zero_ns = self._end_ns = time.perf_counter_ns()
        self._step = ""
        self._attributes: Mapping[str, AttributeValue] = {}
        self._stamps: list[tuple[str, int, int]] = []
        self._error = ""

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
        """Have the step's span written, with one child a stage, each when it happened.

        Args:
            step: "prefill", "draft" or "verify"; of a failed one, its span's name.
            times: with stamps; None of a step that failed. Not to be changed any more.
            attributes: of the span.
            error: what the step ended with, if it failed.
        """
        self._step, self._attributes = step, attributes
        self._stamps = times.stamps if times is not None and times.stamps else []
        if error is not None:  # now: an error would keep its frames, and what they hold
            failed = Span(step, self._caller, context=self.context)
            failed.fail(error)
            self._attributes = {**attributes, **failed.attributes}
            self._error = failed.error
        write(self)

    def spans(self) -> Iterable[Span]:
        """See `spans.SpanRecord`."""
        span = self._span(self._step, self._caller, SpanKind.SERVER, self._zero_ns, self._end_ns)
        span.context = self.context
        span.attributes.update(self._attributes)
        span.error = self._error
        yield span
        if not self._stamps:
            return
        first, last = self._stamps[0][1], self._stamps[-1][2]
        stamps = [(READ, self._zero_ns, first), *self._stamps, (REPLY, last, self._end_ns)]
        for stage, start_ns, end_ns in stamps:
            end_ns = min(end_ns, self._end_ns)
            if end_ns - start_ns >= SHORTEST_NS or stage == FORWARD:
                name = span_of(self._step, stage)
                yield self._span(name, self.context, SpanKind.INTERNAL, start_ns, end_ns)

    def _span(self, name: str, parent: SpanIds, kind: SpanKind, start_ns: int, end_ns: int) -> Span:
        """A span between two stamps of the monotonic clock."""
        epoch_ns = self._start_ns - self._zero_ns
        span = Span(name, parent, kind, start_ns=epoch_ns + start_ns)
        span.end_ns = epoch_ns + end_ns
        return span


def write_inside(
    call: Span,
    step: str,
    times: StageTimes,
    attributes: Mapping[str, AttributeValue],
    end_ns: int | None = None,
) -> int:
    """Write the spans of a step that a service did without a request for it, by its own times.

    The stages are put one after the other up to the step's end. What began before the wait for
    its result is cut off there.

    Args:
        call: the caller's span of that wait, which has ended.
        step: see `StepSpan.record`.
        times: of the step.
        attributes: of its span.
        end_ns: of the step; None for the end of the wait.

    Returns:
        When the step began.
    """
    end_ns = max(call.end_ns if end_ns is None else end_ns, call.start_ns)
    stages = [(stage, times.of(stage)) for stage in ENGINE_STAGES]
    began_ns = at_ns = end_ns - sum(nanoseconds for _, nanoseconds in stages)
    span = Span(step, call.context, SpanKind.SERVER, start_ns=max(at_ns, call.start_ns))
    span.attributes.update(attributes)
    span.attributes["tandem.inside"] = True
    span.attributes["tandem.batch_size"] = times.batch_size
    for stage, nanoseconds in stages:
        start_ns, at_ns = max(at_ns, call.start_ns), at_ns + nanoseconds
        if at_ns - start_ns >= SHORTEST_NS or stage == FORWARD:
            part = Span(span_of(step, stage), span.context, start_ns=start_ns)
            part.end(max(at_ns, start_ns))
    span.end(end_ns)
    return began_ns


@dataclass(frozen=True, slots=True)
class PassRecord:
    """A pass's span, which belongs to several traces: linked with the steps that it served.

    Attributes:
        served: those of them that are traced, at least one.
        start_ns: of time.perf_counter_ns().
        end_ns: the same.
        sequences: that shared the pass.
        tokens: new ones that it was fed.
        zero_ns: of the epoch, when that clock began.
    """

    served: Sequence[SpanIds]
    start_ns: int
    end_ns: int
    sequences: int
    tokens: int
    zero_ns: int = field(default_factory=lambda: time.time_ns() - time.perf_counter_ns())

    @property
    def context(self) -> SpanIds:
        """Of one that it served: recorded, and so is this."""
        return self.served[0]

    def spans(self) -> Iterable[Span]:
        """See `spans.SpanRecord`."""
        span = Span("pass", None, links=self.served, start_ns=self.zero_ns + self.start_ns)
        span.attributes["tandem.batch_size"] = self.sequences
        span.attributes["tandem.tokens"] = self.tokens
        span.end_ns = self.zero_ns + self.end_ns
        yield span

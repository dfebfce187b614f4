"""Spans across processes: W3C context in every message.

Streams outlive their rounds, so the context of a round travels in its messages and not in
the stream's metadata. The official aio instrumentation has one span a stream, fails on
read/write handlers and never ends the span of a cancelled stream; these hooks replace it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from tandem.errors import StartupError, cut

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_PROPAGATOR = TraceContextTextMapPropagator()


def configure(service: str, trace_file: Path | None) -> TracerProvider | None:
    """Set up the process's tracer; None where nothing is traced.

    Raises:
        StartupError: an OTEL_* variable is wrong, or the file cannot be written.
    """
    try:
        # Here, since the SDK checks some of its variables while it is imported.
        from tandem.telemetry.export import make_provider

        provider = make_provider(service, trace_file)
    except ValueError as error:
        raise StartupError(f"bad OTEL_* variable: {error}") from error
    if provider is not None:
        trace.set_tracer_provider(provider)
    return provider


def tracer() -> trace.Tracer:
    """The process's tracer; makes spans that cost nothing where none is configured."""
    return trace.get_tracer("tandem")


def context_of(carrier: Mapping[str, str]) -> Context:
    """The context that a carrier (metadata, or a message's traceparent) names."""
    return _PROPAGATOR.extract(dict(carrier), context=Context())


def traceparent(span: Span) -> str:
    """W3C traceparent of a span; empty where it is not recorded, so nobody records behind it."""
    context = span.get_span_context()
    if not span.is_recording():
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


class StepSpans:
    """Spans of one step in a service, written after its reply is on the wire.

    Stamps cost nothing while the caller waits; the spans are made when it no longer does.

    Args:
        parent: the caller's traceparent.
    """

    def __init__(self, parent: str) -> None:
        self._parent = parent
        self._start_ns = self._end_ns = time.time_ns()
        self._zero_ns = time.perf_counter_ns()

    def end(self) -> None:
        """Stamp the end: when the reply is made, before the caller can read it."""
        self._end_ns = self._start_ns + time.perf_counter_ns() - self._zero_ns

    def record(
        self,
        name: str,
        stages: Mapping[str, int],
        attributes: Mapping[str, AttributeValue],
        error: BaseException | None = None,
    ) -> None:
        """Record the step's span, with one child a stage, back to back from its start.

        Args:
            name: of the span; a child is named `name.stage`.
            stages: durations in nanoseconds, in their order.
            attributes: of the span.
            error: what the step ended with, if it failed.
        """
        end_ns = self._end_ns
        span = tracer().start_span(
            name,
            context_of({"traceparent": self._parent}),
            SpanKind.SERVER,
            attributes,
            start_time=self._start_ns,
        )
        below = trace.set_span_in_context(span)
        at = self._start_ns
        for stage, duration_ns in stages.items():
            child = tracer().start_span(f"{name}.{stage}", below, start_time=at)
            at = min(at + duration_ns, end_ns)
            child.end(at)
        if error is not None:
            fail(span, error)
        span.end(end_ns)


def fail(span: Span, error: BaseException) -> None:
    """Mark a span as failed."""
    span.set_attribute("error.type", type(error).__name__)
    span.set_status(Status(StatusCode.ERROR, cut(str(error))))

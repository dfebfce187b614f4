"""Spans across processes: W3C context in every message, export as OTEL_* says.

Streams outlive their rounds, so the context of a round travels in its messages and not in
the stream's metadata. The official aio instrumentation has one span a stream, fails on
read/write handlers and never ends the span of a cancelled stream; these hooks replace it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.json.file.trace_exporter import FileSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from tandem.errors import StartupError

_PROPAGATOR = TraceContextTextMapPropagator()
# A request makes about nine spans a round; the SDK's 2,048 overflow within a second of load.
_MAX_QUEUED_SPANS = 32_768


def configure(service: str, trace_file: Path | None) -> TracerProvider | None:
    """Set up the process's tracer.

    Exports to `trace_file` as OTLP-JSON lines if given, else as OTEL_TRACES_EXPORTER says
    ("otlp", "otlp_json_file", "none" or any installed exporter), else to OTLP if an
    OTEL_EXPORTER_OTLP_ENDPOINT is set, else nowhere, at no cost.

    Raises:
        StartupError: the exporter is unknown or the file cannot be written.
    """
    exporter = _exporter(trace_file)
    if exporter is None:
        return None
    named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": service}
    provider = TracerProvider(resource=Resource.create(named))
    queued = int(os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE", _MAX_QUEUED_SPANS))
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=queued))
    trace.set_tracer_provider(provider)
    return provider


def _exporter(trace_file: Path | None) -> SpanExporter | None:
    if trace_file is not None:
        try:
            trace_file.parent.mkdir(parents=True, exist_ok=True)
            return FileSpanExporter(trace_file)
        except OSError as error:
            raise StartupError(f"cannot write the trace file {trace_file}: {error}") from error
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    fallback = "otlp" if any(os.environ.get(name) for name in endpoints) else "none"
    name = os.environ.get("OTEL_TRACES_EXPORTER") or fallback
    if name == "none" or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if name == "otlp":
        protocol = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
        name = f"otlp_proto_{protocol.removesuffix('/protobuf')}"
    found = entry_points(group="opentelemetry_traces_exporter", name=name)
    if not found:
        raise StartupError(
            f"OTEL_TRACES_EXPORTER asks for {name!r}, which is not installed;"
            " use otlp, otlp_json_file, console or none"
        )
    made: SpanExporter = next(iter(found)).load()()
    return made


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
    """

    def __init__(self, parent: str) -> None:
        self._parent = parent
        self._start_ns = time.time_ns()
        self._zero_ns = time.perf_counter_ns()

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
        if not self._parent:
            return
        end_ns = self._start_ns + time.perf_counter_ns() - self._zero_ns
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
    span.set_status(Status(StatusCode.ERROR, str(error)))

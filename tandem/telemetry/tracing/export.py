"""Where spans go: to the exporter that OTEL_* variables name, or into a file."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode

from tandem import __version__
from tandem.errors import StartupError
from tandem.telemetry import exporters
from tandem.telemetry.tracing.ids import SpanIds
from tandem.telemetry.tracing.spans import Span, SpanRecord, guarded
from tandem.telemetry.tracing.trace_file import TraceFile

# A request makes about twenty spans a round; the SDK's 2,048 overflow within a second of load.
_MAX_QUEUED_SPANS = 32_768
# Named like OpenTelemetry's own loggers, whose lines are rate-limited.
_log = logging.getLogger("opentelemetry.tandem")
# How long a process waits at its end for a collector that may be unreachable.
_CLOSE_SECONDS = 5.0
_SCOPE = InstrumentationScope("tandem")
_UNSET = Status(StatusCode.UNSET)


class SpanWriter:
    """Gives ended spans to the SDK: a `spans.Recorder`.

    Args:
        provider: gives the sampler and ids.
        processor: takes spans without blocking.
    """

    def __init__(self, provider: TracerProvider, processor: SpanProcessor) -> None:
        self.trace_id = provider.id_generator.generate_trace_id
        self.span_id = provider.id_generator.generate_span_id
        self._sampler = provider.sampler
        self._processor = processor

    def wants(self, context: Context, trace_id: int, name: str) -> bool:
        """See `spans.Recorder`."""
        decided = self._sampler.should_sample(context, trace_id, name, SpanKind.SERVER)
        return decided.decision is Decision.RECORD_AND_SAMPLE

    def write(self, record: SpanRecord) -> None:
        """See `spans.Recorder`."""
        # The processor only reads the flags of the record's context.
        self._processor.on_end(record)  # type: ignore[arg-type]

    def close(self) -> None:
        """Write the queued spans, for a bounded time."""
        closing = threading.Thread(target=self._processor.shutdown, daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)


class _Counted(SpanExporter):
    """An exporter that counts what it was given.

    Attributes:
        taken: records so far.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        self.taken = 0
        self._exporter = exporter
        self.shutdown = exporter.shutdown  # type: ignore[method-assign]

    def export(self, records: Sequence[ReadableSpan]) -> SpanExportResult:
        """See `SpanExporter`."""
        self.taken += len(records)
        return self._exporter.export(records)


class SpanQueue(BatchSpanProcessor):
    """The SDK's queue. It logs once when it fills up, where the SDK makes a log record for each
    span that it drops: 20 microseconds on the event loop.

    Args:
        exporter: takes the records, in a thread of the SDK's.
        places: records that may wait. Further ones are dropped.

    Raises:
        ValueError: an OTEL_BSP_* variable is wrong, or does not fit `places`.
    """

    def __init__(self, exporter: SpanExporter, places: int) -> None:
        self._counted = _Counted(exporter)
        self._places = places
        self._written = 0
        self._full = False
        super().__init__(self._counted, max_queue_size=places)

    @property
    def waiting(self) -> int:
        """Records in the queue."""
        return self._written - self._counted.taken

    def on_end(self, record: ReadableSpan) -> None:
        """Queue an ended record, or drop it."""
        full = self.waiting >= self._places
        if full and not self._full:
            _log.warning(
                "the queue of spans is full, and spans are lost: export faster, sample fewer"
                " requests, or raise OTEL_BSP_MAX_QUEUE_SIZE (now %d)",
                self._places,
            )
        self._full = full
        if not full:
            self._written += 1
            super().on_end(record)


class ReadableExporter(SpanExporter):
    """Gives records to an exporter of the SDK, as the SDK's spans.

    Args:
        exporter: takes them.
        resource: this process.
    """

    def __init__(self, exporter: SpanExporter, resource: Resource) -> None:
        self._exporter = exporter
        self._resource = resource
        self.shutdown = exporter.shutdown  # type: ignore[method-assign]

    def export(self, records: Sequence[SpanRecord]) -> SpanExportResult:  # type: ignore[override]
        """See `SpanExporter`."""
        return self._exporter.export(guarded(records, self._readable))

    def _readable(self, span: Span) -> ReadableSpan:
        return ReadableSpan(
            name=span.name,
            context=_context(span.context),
            parent=None if span.parent is None else _context(span.parent),
            resource=self._resource,
            attributes=span.attributes,
            events=[Event(name, timestamp=at_ns) for name, at_ns in span.events],
            links=[Link(_context(ids)) for ids in span.links],
            kind=span.kind,
            status=Status(StatusCode.ERROR, span.error) if span.error else _UNSET,
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=_SCOPE,
        )


def _context(ids: SpanIds) -> SpanContext:
    """A span's ids as the SDK's context."""
    return SpanContext(ids.trace_id, ids.span_id, False, ids.trace_flags, ids.trace_state)


def make_writer(service: str, trace_file: Path | None) -> SpanWriter | None:
    """The writer of a service's spans, with its exporter; None if nothing is traced.

    Exports to `trace_file` as OTLP-JSON lines if given, else to OTEL_TRACES_EXPORTER ("otlp",
    "console", "none" or any installed exporter), else by OTLP if an OTEL_EXPORTER_OTLP_ENDPOINT is
    set, else nowhere, at no cost. OTLP uses the protocol that OTEL_EXPORTER_OTLP_TRACES_PROTOCOL or
    OTEL_EXPORTER_OTLP_PROTOCOL names, else gRPC.

    Raises:
        StartupError: the exporter is unknown or cannot be made, or the file cannot be written.
        ValueError: another OTEL_* variable is wrong.
    """
    resource = resource_of(service)
    exporter = _exporter(trace_file, resource)
    if exporter is None:
        return None
    queued = os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE") or str(_MAX_QUEUED_SPANS)
    if not queued.isdecimal():
        raise StartupError(f"OTEL_BSP_MAX_QUEUE_SIZE must be a whole number, got {queued!r}")
    provider = TracerProvider(resource=resource)
    return SpanWriter(provider, SpanQueue(exporter, int(queued)))


def resource_of(service: str) -> Resource:
    """Names this process; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES override our values."""
    named = {
        "service.name": service,
        "service.namespace": "tandem",
        "service.version": __version__,
        "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
    }
    said = OTELResourceDetector().detect().attributes
    return Resource.create({name: value for name, value in named.items() if name not in said})


def _exporter(trace_file: Path | None, resource: Resource) -> SpanExporter | None:
    if trace_file is not None:
        try:
            return TraceFile(trace_file, resource)
        except OSError as error:
            raise StartupError(f"cannot write the trace file {trace_file}: {error}") from error
    name = exporters.chosen("traces")
    if name == "none":
        return None
    return ReadableExporter(exporters.installed("traces", name), resource)

"""Where spans go: as OTEL_* says, or into a file."""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from pathlib import Path

from opentelemetry.exporter.otlp.json.file.trace_exporter import FileSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

from tandem.errors import StartupError

# A request makes about nine spans a round; the SDK's 2,048 overflow within a second of load.
_MAX_QUEUED_SPANS = 32_768
_OTLP_EXPORTERS = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}


def make_provider(service: str, trace_file: Path | None) -> TracerProvider | None:
    """A tracer provider with its exporter.

    Exports to `trace_file` as OTLP-JSON lines if given, else as OTEL_TRACES_EXPORTER says
    ("otlp", "otlp_json_file", "none" or any installed exporter), else to OTLP if an
    OTEL_EXPORTER_OTLP_ENDPOINT is set, else nowhere, at no cost. OTLP speaks the protocol that
    OTEL_EXPORTER_OTLP_TRACES_PROTOCOL or OTEL_EXPORTER_OTLP_PROTOCOL names, else gRPC.

    Raises:
        StartupError: the exporter is unknown or cannot be made, or the file cannot be written.
        ValueError: another OTEL_* variable is wrong.
    """
    exporter = _exporter(trace_file)
    if exporter is None:
        return None
    named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": service}
    provider = TracerProvider(resource=Resource.create(named))
    queued = os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE") or str(_MAX_QUEUED_SPANS)
    if not queued.isdecimal():
        raise StartupError(f"OTEL_BSP_MAX_QUEUE_SIZE must be a whole number, got {queued!r}")
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=int(queued)))
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
    return _installed(_otlp() if name == "otlp" else name)


def _otlp() -> str:
    """Name of the exporter for the protocol asked for."""
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next(filter(None, map(os.environ.get, names)), "grpc")
    if protocol not in _OTLP_EXPORTERS:
        raise StartupError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL asks for {protocol!r}; use {' or '.join(_OTLP_EXPORTERS)}"
        )
    return _OTLP_EXPORTERS[protocol]


def _installed(name: str) -> SpanExporter:
    found = entry_points(group="opentelemetry_traces_exporter", name=name)
    if not found:
        raise StartupError(
            f"OTEL_TRACES_EXPORTER asks for {name!r}, which is not installed;"
            " use otlp, otlp_json_file, console or none"
        )
    try:
        made: SpanExporter = next(iter(found)).load()()
    except Exception as error:  # each exporter reads its own variables, and raises as it likes
        raise StartupError(f"cannot make the exporter {name!r} from OTEL_*: {error}") from error
    return made

"""From the environment to a running service: exporters, and what cannot start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tandem.telemetry.tracing import spans
from tandem.telemetry.tracing.export import make_writer
from tests.support.processes.refusals import refusal
from tests.support.wire.collector import Collector, collecting


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as server:
        yield server


@pytest.mark.parametrize(
    ("general", "traces"), [("http/protobuf", None), ("grpc", "http/protobuf")]
)
def test_spans_go_out_over_http(
    general: str, traces: str | None, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OTEL_EXPORTER_OTLP_TRACES_PROTOCOL wins over OTEL_EXPORTER_OTLP_PROTOCOL."""
    address = f"http://127.0.0.1:{collector.server_port}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", general)
    if traces is not None:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", traces)
    writer = make_writer("orchestrator", None)
    assert writer is not None
    spans.install(writer)
    span = spans.head("generate", {})
    assert span is not None
    span.end()
    spans.install(None)
    writer.close()
    ((path, body),) = collector.taken
    assert path == "/v1/traces"
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    assert [span.name for span in resource.scope_spans[0].spans] == ["generate"]
    said = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert said["service.name"] == "orchestrator"
    assert said["service.namespace"] == "tandem"
    assert said["service.version"]


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", "'http/json'; use grpc or http/protobuf"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon", "could not convert string to float: 'soon'"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "many", "OTEL_BSP_MAX_QUEUE_SIZE must be a whole number"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "3", "max_export_batch_size must be less than or equal"),
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "x", "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT must be"),
        ("OTEL_TRACES_EXPORTER", "carrier_pigeon", "'carrier_pigeon', which is not installed"),
        ("TANDEM_ORCHESTRATOR_TRACE_FILE", "/proc/nowhere/trace", "cannot write the trace file"),
        ("TANDEM_ORCHESTRATOR_LISTEN", "127.0.0.1:99999", "a port is at most 65535"),
    ],
)
def test_what_cannot_start_exits_with_2_and_one_line(
    variable: str, value: str, sentence: str
) -> None:
    ours = {"TANDEM_ORCHESTRATOR_LISTEN": "127.0.0.1:0", "OTEL_TRACES_EXPORTER": "otlp"}
    line = refusal("orchestrator", {**ours, variable: value})
    assert line.startswith("orchestrator: ")
    assert sentence in line

"""Metrics as OTLP points, and their export to a collector."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import structlog
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality
from opentelemetry.sdk.metrics.export import (
    ConsoleMetricExporter,
    Histogram,
    MetricExportResult,
)
from opentelemetry.sdk.resources import Resource

from tandem.telemetry.metrics import catalog as metrics
from tandem.telemetry.metrics.instruments import Instruments
from tandem.telemetry.metrics.otlp import OtlpMetrics, make_exporter, metrics_data
from tests.support.wire.collector import Collector, collecting
from tests.unit.telemetry.recorded_metrics import TRACED, recorded

pytestmark = pytest.mark.usefixtures("no_otel")


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as server:
        yield server


def test_otlp_points_say_what_prometheus_says(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    sender = OtlpMetrics(recorded(), make_exporter("otlp_proto_http"), 3600)
    sender.stop()
    ((path, body),) = collector.taken
    assert path == "/v1/metrics"
    (resource,) = ExportMetricsServiceRequest.FromString(body).resource_metrics
    named = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
    assert named["service.name"] == "orchestrator"
    sent = {metric.name: metric for metric in resource.scope_metrics[0].metrics}
    rounds = sent["tandem.rounds"].sum
    assert (rounds.is_monotonic, rounds.data_points[0].as_int) == (True, 3)
    cumulative = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
    assert rounds.aggregation_temporality == cumulative
    assert 0 < rounds.data_points[0].start_time_unix_nano < rounds.data_points[0].time_unix_nano
    assert sent["tandem.requests"].unit == "{request}"
    ends = {
        tuple((pair.key, pair.value.string_value) for pair in point.attributes): point.as_int
        for point in sent["tandem.requests"].sum.data_points
    }
    assert ends == {
        (("status", "OK"), ("finish_reason", "length"), ("front", "grpc")): 2,
        (("status", "CANCELLED"), ("front", "grpc")): 1,
    }
    assert sent["tandem.requests.active"].gauge.data_points[0].as_int == 7
    first = sent["gen_ai.server.time_to_first_token"].histogram
    assert first.aggregation_temporality == cumulative
    (point,) = first.data_points
    assert tuple(point.explicit_bounds) == metrics.TIME_TO_FIRST_TOKEN.buckets
    assert list(point.bucket_counts) == [1, 0, 0, 3, *(0,) * 12, 1]
    assert point.count == 5
    assert point.sum == pytest.approx(99.0535)
    assert not point.HasField("min")
    (exemplar,) = point.exemplars
    assert exemplar.as_double == 0.018
    assert {"trace_id": exemplar.trace_id.hex(), "span_id": exemplar.span_id.hex()} == TRACED
    (pair,) = (
        pair
        for pair in sent["gen_ai.server.request.duration"].histogram.data_points[0].attributes
        if pair.key == "error.type"
    )
    assert pair.value.string_value == "CANCELLED"
    # What nobody has recorded yet is not sent; a counter without labels is 0 from the start.
    assert "tandem.stage.duration" not in sent
    assert sent["tandem.drafters.lost"].sum.data_points[0].as_int == 0


def test_each_series_of_a_histogram_is_a_point() -> None:
    instruments = Instruments("target")
    for stage, count in (("queue", 2), ("forward", 3)):
        histogram = instruments.histogram(metrics.STAGE_DURATION, "target", "verify", stage)
        for _ in range(count):
            histogram.observe(0.002)
    (resource,) = metrics_data(instruments, Resource({})).resource_metrics
    (found,) = (
        metric.data
        for metric in resource.scope_metrics[0].metrics
        if metric.name == "tandem.stage.duration"
    )
    assert isinstance(found, Histogram)
    counts = {point.attributes["stage"]: point.count for point in found.data_points}  # type: ignore[index]
    assert counts == {"queue": 2, "forward": 3}


def test_metrics_go_out_again_and_again(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = f"http://127.0.0.1:{collector.server_port}/v1/metrics"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", endpoint)
    sender = OtlpMetrics(recorded(), make_exporter("otlp_proto_http"), 0.01)
    waiting = threading.Event()
    for _ in range(1000):
        if len(collector.taken) > 2:
            break
        waiting.wait(0.01)
    sender.stop()
    assert len(collector.taken) > 2


def test_an_exporter_that_fails_is_tried_again_and_said_once() -> None:
    tries, often = 0, threading.Event()

    class Failing(ConsoleMetricExporter):
        def export(self, *arguments: object, **options: object) -> MetricExportResult:
            nonlocal tries
            tries += 1
            if tries > 2:
                often.set()
            raise OSError("the disk is full")

    with structlog.testing.capture_logs() as logs:
        sender = OtlpMetrics(recorded(), Failing(), 0.01)
        assert often.wait(30)
        sender.stop()
    said = [line["error"] for line in logs if line["event"] == "metrics cannot be sent"]
    assert said == ["the disk is full"]

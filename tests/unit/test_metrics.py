"""The list of metrics, and what its readers make of it: Prometheus' names, OTLP's points."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

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

from tandem.errors import StartupError
from tandem.telemetry import metrics
from tandem.telemetry.exposition import Exposition
from tandem.telemetry.instruments import Instruments
from tandem.telemetry.metrics import METRICS, Kind
from tandem.telemetry.otlp_metrics import OtlpMetrics, make_exporter, metrics_data
from tandem.telemetry.readers import metering_of

ROOT = Path(__file__).parents[2]
TRACED = {"trace_id": "0af7651916cd43dd8448eb211c80319c", "span_id": "b7ad6b7169203331"}


class Collector(HTTPServer):
    """Takes metrics over HTTP, as a collector does."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Take)
        self.taken: list[bytes] = []


class _Take(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        assert self.path == "/v1/metrics"
        self.server.taken.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Keep standard error clean."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def no_otel(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


def test_names_are_translated_as_everybody_does() -> None:
    assert metrics.TIME_TO_FIRST_TOKEN.prometheus_name == (
        "gen_ai_server_time_to_first_token_seconds"
    )
    assert metrics.DRAFT_PAYLOAD.prometheus_name == "tandem_draft_payload_bytes_total"
    assert metrics.NUM_ACCEPTED_TOKENS_PER_POS.prometheus_name == (
        "tandem_spec_decode_num_accepted_tokens_per_pos_total"
    )
    assert metrics.KV_POSITIONS.prometheus_name == "tandem_kv_positions"
    names = [metric.prometheus_name for metric in METRICS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("role", ["drafter", "target", "orchestrator"])
def test_instruments_bear_the_names_of_the_list(role: str) -> None:
    instruments = Instruments(role)
    made = {family.name: family.type for family in instruments.registry.collect()}
    listed = {
        metric.prometheus_name.removesuffix("_total"): metric.kind.value
        for metric in METRICS
        if role in metric.roles
    }
    assert made == listed


def test_only_histograms_have_buckets_and_they_rise() -> None:
    for metric in METRICS:
        assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM), metric.name
        assert list(metric.buckets) == sorted(set(metric.buckets)), metric.name


def test_buckets_of_the_conventions_are_all_there() -> None:
    """A query for one of their bounds has its answer."""
    token = {0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5}
    assert token <= set(metrics.TIME_PER_OUTPUT_TOKEN.buckets)
    assert {0.01 * 2**i for i in range(14)} <= set(metrics.REQUEST_DURATION.buckets)
    first = {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10}
    assert first == set(metrics.TIME_TO_FIRST_TOKEN.buckets)


def recorded() -> Instruments:
    """An orchestrator's, with a little in them."""
    instruments = Instruments("orchestrator")
    instruments.counter(metrics.ROUNDS).value += 3
    instruments.counter(metrics.REQUESTS, "OK", "length").value += 2
    instruments.counter(metrics.REQUESTS, "CANCELLED", "").value += 1
    instruments.watch(metrics.REQUESTS_ACTIVE, lambda: 7)
    of = ("text_completion", "tandem", "fake")
    first = instruments.histogram(metrics.TIME_TO_FIRST_TOKEN, *of)
    for seconds in (0.0005, 0.015, 0.02, 99.0):
        first.observe(seconds)
    first.observe(0.018, TRACED)
    whole = instruments.histogram(metrics.REQUEST_DURATION, *of, "CANCELLED")
    whole.observe(0.5)
    return instruments


def test_otlp_points_say_what_prometheus_says(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    sender = OtlpMetrics(recorded(), make_exporter("otlp_proto_http"), 3600)
    sender.stop()
    (body,) = collector.taken
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
        (("status", "OK"), ("finish_reason", "length")): 2,
        (("status", "CANCELLED"),): 1,
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


def test_where_nobody_reads_nothing_is_even_imported() -> None:
    code = (
        "import sys; import orchestrator.servicer, drafter_svc.servicer;"
        "from tandem.telemetry.readers import metering_of;"
        "assert metering_of('orchestrator', None) is None;"
        "assert 'prometheus_client' not in sys.modules;"
        "assert 'opentelemetry.sdk.metrics' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


@pytest.mark.parametrize(
    "variables",
    [
        {"OTEL_METRICS_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"},
        {"OTEL_SDK_DISABLED": "true", "OTEL_METRICS_EXPORTER": "otlp"},
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1"},
    ],
)
def test_nothing_is_metered_where_it_is_not_asked_for(
    variables: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert metering_of("target", None) is None


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"OTEL_METRICS_EXPORTER": "prometheus"}, "set METRICS_LISTEN of each service"),
        ({"OTEL_METRICS_EXPORTER": "pigeon"}, "'pigeon', which is not installed"),
        (
            {
                "OTEL_METRICS_EXPORTER": "otlp",
                "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": "delta",
            },
            "must be cumulative",
        ),
        (
            {"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "udp"},
            "'udp'; use grpc or http/protobuf",
        ),
        (
            {"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_METRICS_TIMEOUT": "soon"},
            "cannot make the exporter",
        ),
    ],
)
def test_a_bad_otel_variable_is_one_sentence(
    variables: Mapping[str, str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StartupError, match=sentence):
        metering_of("target", None)


def test_a_service_whose_metrics_port_is_taken_exits_with_2_and_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        variables = {"LISTEN": "127.0.0.1:0", "METRICS_LISTEN": listen}
        ours = {f"TANDEM_ORCHESTRATOR_{name}": value for name, value in variables.items()}
        result = subprocess.run(
            [sys.executable, "-m", "orchestrator"],
            env={**os.environ, **ours},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert result.returncode == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"orchestrator: cannot serve metrics on {listen}: ")
    assert "METRICS_LISTEN" in line


def test_clients_that_dribble_stop_neither_the_scrapes_nor_the_end() -> None:
    """A byte now and then never times out by itself."""
    served = Exposition("127.0.0.1:0", recorded().registry)
    clients = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(3)]
    for client in clients:
        client.send(b"G")
    with urllib.request.urlopen(f"http://127.0.0.1:{served.port}/metrics", timeout=30) as reply:
        assert b"tandem" in reply.read()
    for client in clients:
        client.send(b"E")
    stopping = threading.Thread(target=served.stop)
    stopping.start()
    stopping.join(30)
    assert not stopping.is_alive()
    for client in clients:
        client.close()


def test_more_clients_than_there_are_places_are_hung_up_on() -> None:
    served = Exposition("127.0.0.1:0", recorded().registry)
    clients = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(40)]
    assert any(client.recv(1) == b"" for client in clients[-1:])
    served.stop()
    for client in clients:
        client.close()


def test_a_client_that_says_nothing_does_not_stop_the_scrapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tandem.telemetry.exposition._Quiet.timeout", 0.1)
    served = Exposition("127.0.0.1:0", recorded().registry)
    try:
        with socket.create_connection(("127.0.0.1", served.port)):
            url = f"http://127.0.0.1:{served.port}/metrics"
            with urllib.request.urlopen(url, timeout=30) as reply:
                assert b"tandem_rounds_total 3.0" in reply.read()
        posted = urllib.request.Request(url, data=b"x")
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(posted, timeout=30)
    finally:
        served.stop()


def test_the_plain_format_has_no_exemplars_and_the_open_one_has() -> None:
    served = Exposition(
        "[::1]:0" if socket.has_dualstack_ipv6() else "127.0.0.1:0", recorded().registry
    )
    host = "[::1]" if socket.has_dualstack_ipv6() else "127.0.0.1"
    try:
        texts = []
        for accept in ("text/plain", "application/openmetrics-text"):
            asked = urllib.request.Request(
                f"http://{host}:{served.port}/metrics", headers={"Accept": accept}
            )
            with urllib.request.urlopen(asked, timeout=30) as reply:
                texts.append(reply.read().decode())
    finally:
        served.stop()
    assert [TRACED["trace_id"] in text for text in texts] == [False, True]

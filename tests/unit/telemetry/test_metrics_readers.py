"""Which readers of metrics OTEL's variables choose; without a reader nothing is measured."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

import pytest

from tandem.errors import StartupError
from tandem.telemetry.metrics.readers import metering_of
from tandem.telemetry.tracing.ids import SpanIds
from tests.support.repository import ROOT
from tests.support.waiting import HANG_SECONDS

pytestmark = pytest.mark.usefixtures("no_otel")


def test_where_nobody_reads_nothing_is_even_imported() -> None:
    code = (
        "import sys; import orchestrator.front.grpc.servicer, drafter_svc.servicer;"
        "from tandem.telemetry.metrics.readers import metering_of;"
        "assert metering_of('orchestrator', None) is None;"
        "assert 'prometheus_client' not in sys.modules;"
        "assert 'opentelemetry.sdk.metrics' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=HANG_SECONDS)


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
        (
            {"OTEL_METRICS_EXPORTER": "console", "OTEL_METRICS_EXEMPLAR_FILTER": "always_on"},
            "'always_on'; use trace_based or always_off",
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


@pytest.mark.parametrize("filter_", ["", "trace_based", "always_off"])
def test_the_exemplar_filter_decides_whether_measurements_lead_to_traces(
    filter_: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "console")
    monkeypatch.setenv("OTEL_METRICS_EXEMPLAR_FILTER", filter_)
    metering = metering_of("target", None)
    assert metering is not None
    exemplar = metering.instruments.exemplar_of(SpanIds(10, 11))
    traced = {"trace_id": f"{10:032x}", "span_id": f"{11:016x}"}
    assert exemplar == (None if filter_ == "always_off" else traced)
    assert metering.instruments.exemplar_of(None) is None

"""Metrics by OTLP: an exporter of the SDK sends the instruments' values periodically.

The SDK's meter provider is not used: it has no histogram that is only read when it is sent, and we
would have to record into its instruments too, at several times the cost.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import structlog
from opentelemetry.sdk.metrics import Exemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    MetricExporter,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Metric as OtlpMetric
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from tandem.errors import StartupError, first_line
from tandem.telemetry import exporters
from tandem.telemetry.metrics.catalog import Metric, MetricKind, underscored
from tandem.telemetry.metrics.instruments import Instruments
from tandem.telemetry.tracing.export import resource_of

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

_log = structlog.get_logger(__name__)

_CUMULATIVE = AggregationTemporality.CUMULATIVE
_NS = 1_000_000_000
# How long the process waits at its end for the last export, or for an unreachable collector.
_LAST_SECONDS = 2.0


class OtlpMetrics:
    """Sends a service's metrics, from a thread of its own.

    Args:
        instruments: to read.
        exporter: that sends; shut down at the end.
        seconds: between two exports.
    """

    def __init__(self, instruments: Instruments, exporter: MetricExporter, seconds: float) -> None:
        self._instruments = instruments
        self._exporter = exporter
        self._seconds = seconds
        self._failed = False
        self._resource = resource_of(instruments.role)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="otlp-metrics", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.wait(self._seconds):
            self._send()
        self._send()

    def _send(self) -> None:
        try:
            self._exporter.export(metrics_data(self._instruments, self._resource))
        except Exception as error:  # of any exporter; those of OTLP log failures themselves
            if not self._failed:
                _log.warning("metrics cannot be sent", error=first_line(error))
            self._failed = True

    def stop(self) -> None:
        """Send once more, and shut down. Waits at most two seconds for each."""
        self._stopping.set()
        self._thread.join(_LAST_SECONDS)
        self._exporter.shutdown(timeout_millis=_LAST_SECONDS * 1000)


def make_exporter(name: str) -> MetricExporter:
    """The metrics exporter of this name.

    Raises:
        StartupError: it is unknown or cannot be made, or OTEL_* asks for something unsupported.
    """
    if name == "prometheus":
        raise StartupError(
            "OTEL_METRICS_EXPORTER asks for 'prometheus'; set METRICS_LISTEN of each service"
            " instead, and OTEL_METRICS_EXPORTER to none"
        )
    preference = "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE"
    if os.environ.get(preference, "cumulative").lower() != "cumulative":
        raise StartupError(f"{preference} must be cumulative: metrics are sent no other way")
    made: MetricExporter = exporters.installed("metrics", name)
    return made


def interval_seconds() -> float:
    """Seconds between two exports: OTEL_METRIC_EXPORT_INTERVAL, in milliseconds; default 60 s.

    Raises:
        StartupError: the variable is not a positive number.
    """
    value = os.environ.get("OTEL_METRIC_EXPORT_INTERVAL") or "60000"
    try:
        seconds = float(value) / 1000
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= threading.TIMEOUT_MAX:
        raise StartupError(
            f"OTEL_METRIC_EXPORT_INTERVAL must be a positive number of milliseconds, got {value!r}"
        )
    return seconds


def metrics_data(instruments: Instruments, resource: Resource) -> MetricsData:
    """The instruments' current values in the SDK's form. Metrics without a value are left out.

    Args:
        instruments: to read.
        resource: the process that they belong to.
    """
    start_ns, now_ns = instruments.started_ns, time.time_ns()
    metrics = [
        OtlpMetric(metric.name, metric.meaning, metric.unit, data)
        for metric, family in instruments.families()
        if (data := _data(metric, family.samples, start_ns, now_ns)).data_points
    ]
    scope = ScopeMetrics(InstrumentationScope("tandem"), metrics, "")
    return MetricsData([ResourceMetrics(resource, [scope], "")])


def _data(
    metric: Metric, samples: Sequence[Sample], start_ns: int, now_ns: int
) -> Sum | Gauge | Histogram:
    if metric.kind is MetricKind.HISTOGRAM:
        series = groupby(samples, lambda sample: _attributes(metric, sample))
        points = [_histogram(metric, of, list(own), start_ns, now_ns) for of, own in series]
        return Histogram(points, _CUMULATIVE)
    numbers = [
        NumberDataPoint(_attributes(metric, sample), start_ns, now_ns, int(sample.value))
        for sample in samples
    ]
    if metric.kind is MetricKind.GAUGE:
        return Gauge(numbers)
    return Sum(numbers, _CUMULATIVE, is_monotonic=True)


def _attributes(metric: Metric, sample: Sample) -> Mapping[str, str]:
    """A sample's labels under OpenTelemetry's names, without empty ones."""
    found = {name: sample.labels[underscored(name)] for name in metric.labels}
    return {name: value for name, value in found.items() if value}


def _histogram(
    metric: Metric,
    attributes: Mapping[str, str],
    samples: Sequence[Sample],
    start_ns: int,
    now_ns: int,
) -> HistogramDataPoint:
    """One series. Prometheus counts values up to each bound, OTLP those between two bounds."""
    buckets = [sample for sample in samples if sample.name.endswith("_bucket")]
    (total,) = (sample.value for sample in samples if sample.name.endswith("_sum"))
    below = [0, *(int(bucket.value) for bucket in buckets)]
    unknown: Any = None  # minimum and maximum: optional in the protocol, not in the SDK's type
    return HistogramDataPoint(
        attributes=attributes,
        start_time_unix_nano=start_ns,
        time_unix_nano=now_ns,
        count=below[-1],
        sum=total,
        bucket_counts=[high - low for low, high in pairwise(below)],
        explicit_bounds=metric.buckets,
        min=unknown,
        max=unknown,
        exemplars=list(_exemplars(buckets)),
    )


def _exemplars(buckets: Iterable[Sample]) -> Iterable[Exemplar]:
    for bucket in buckets:
        if (found := bucket.exemplar) is not None and found.timestamp is not None:
            yield Exemplar(
                {},
                found.value,
                int(float(found.timestamp) * _NS),
                int(found.labels["span_id"], 16),
                int(found.labels["trace_id"], 16),
            )

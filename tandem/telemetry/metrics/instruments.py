"""What a service records into: the metrics of the catalog, in a Prometheus registry.

All readers share this store. A count is an addition; an observation takes a lock or two, about a
microsecond. The SDK's own instruments take 5 microseconds, and have no histogram that is only
evaluated when it is read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Gauge, Histogram, disable_created_metrics
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.metrics_core import Metric as Family

from tandem.telemetry.metrics.catalog import METRICS, Metric, MetricKind, underscored
from tandem.telemetry.tracing.ids import SpanIds


class Count:
    """A number that only grows. Added to in one thread, read in any.

    Attributes:
        value: the count so far.
    """

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


class Counter:
    """A counter's series.

    prometheus_client's own counters take a lock and a check for each addition. With a dozen
    additions in every round, that would be the most expensive part of recording.

    Args:
        metric: of the series.
        registry: that collects them.
    """

    def __init__(self, metric: Metric, registry: CollectorRegistry) -> None:
        self._metric = metric
        self._series: dict[tuple[str, ...], Count] = {}
        if not metric.labels:
            self._series[()] = Count()
        registry.register(self)

    def series(self, labels: tuple[str, ...]) -> Count:
        """The series with these labels; a new one starts at 0."""
        assert len(labels) == len(self._metric.labels)
        return self._series.setdefault(labels, Count())

    def collect(self) -> Iterator[Family]:
        """For the registry."""
        metric = self._metric
        family = CounterMetricFamily(
            metric.prometheus_name.removesuffix("_total"),
            metric.meaning,
            labels=tuple(map(underscored, metric.labels)),
            unit=metric.prometheus_unit,
        )
        for labels, count in list(self._series.items()):
            family.add_metric(labels, count.value)
        yield family

    def describe(self) -> Iterator[Family]:
        """For the registry, which refuses duplicate names."""
        return self.collect()


_Instrument = Counter | Gauge | Histogram


class Instruments:
    """The metrics of one service, all created at the start.

    Attributes:
        role: of the service.
        registry: for writers of Prometheus' formats.
        started_ns: when counting began, by time.time_ns().

    Args:
        role: of the service.
        exemplars: whether measurements of traced requests lead to their traces.
    """

    def __init__(self, role: str, exemplars: bool = True) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # nothing reads them
        self.role = role
        self._exemplars = exemplars
        self.registry = CollectorRegistry()
        self.started_ns = time.time_ns()
        self._all = {
            metric: _instrument(metric, self.registry) for metric in METRICS if role in metric.roles
        }

    def counter(self, metric: Metric, *labels: str) -> Count:
        """A counter's series with these labels."""
        found = self._all[metric]
        assert isinstance(found, Counter)
        return found.series(labels)

    def histogram(self, metric: Metric, *labels: str) -> Histogram:
        """A histogram's series with these labels."""
        found = self._all[metric]
        assert isinstance(found, Histogram)
        return found.labels(*labels) if labels else found

    def watch(self, metric: Metric, read: Callable[[], float], *labels: str) -> None:
        """Compute a gauge by `read` whenever it is collected, in any thread."""
        found = self._all[metric]
        assert isinstance(found, Gauge)
        (found.labels(*labels) if labels else found).set_function(read)

    def exemplar_of(self, span: SpanIds | None) -> dict[str, str] | None:
        """The exemplar that leads from a measurement to its trace; None without one."""
        if span is None or not self._exemplars:
            return None
        return {"trace_id": f"{span.trace_id:032x}", "span_id": f"{span.span_id:016x}"}

    def families(self) -> Iterator[tuple[Metric, Family]]:
        """Each metric with its current values."""
        for metric, instrument in self._all.items():
            (family,) = instrument.collect()
            yield metric, family


def _instrument(metric: Metric, registry: CollectorRegistry) -> _Instrument:
    if metric.kind is MetricKind.COUNTER:
        return Counter(metric, registry)
    names = (underscored(metric.name), metric.meaning, tuple(map(underscored, metric.labels)))
    unit = metric.prometheus_unit
    if metric.kind is MetricKind.GAUGE:
        return Gauge(*names, unit=unit, registry=registry)
    return Histogram(*names, unit=unit, registry=registry, buckets=metric.buckets)

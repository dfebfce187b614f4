"""What a service records into: the list's metrics, as Prometheus' registry holds them.

One store for all readers. A count is an addition; an observation takes a lock or two, about a
microsecond. The SDK's own instruments take 5, and have no histogram that is only looked at when
somebody asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Gauge, Histogram, disable_created_metrics
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.metrics_core import Metric as Family

from tandem.telemetry.metrics.catalog import METRICS, Metric, MetricKind, underscored


class Count:
    """A number that only grows. Added to in one thread, read in any.

    Attributes:
        value: so far.
    """

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


class Counter:
    """A counter's series. The client's own take a lock and a check for each addition, which a
    dozen of them in every round would make the dearest part of it.

    Args:
        metric: of which these are.
        registry: that shows them.
    """

    def __init__(self, metric: Metric, registry: CollectorRegistry) -> None:
        self._metric = metric
        self._series: dict[tuple[str, ...], Count] = {}
        if not metric.labels:
            self._series[()] = Count()
        registry.register(self)

    def series(self, labels: tuple[str, ...]) -> Count:
        """The one that has these labels; 0 if it is new."""
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
        """For the registry, which refuses a name that it has."""
        return self.collect()


_Instrument = Counter | Gauge | Histogram


class Instruments:
    """The metrics of one service, all there from the start.

    Attributes:
        role: of the service.
        registry: for whoever writes Prometheus' formats.
        started_ns: when counting began, by time.time_ns().
    """

    def __init__(self, role: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a line a series for nobody
        self.role = role
        self.registry = CollectorRegistry()
        self.started_ns = time.time_ns()
        self._all = {
            metric: _instrument(metric, self.registry) for metric in METRICS if role in metric.roles
        }

    def counter(self, metric: Metric, *labels: str) -> Count:
        """The series of a counter that has these labels."""
        found = self._all[metric]
        assert isinstance(found, Counter)
        return found.series(labels)

    def histogram(self, metric: Metric, *labels: str) -> Histogram:
        """The series of a histogram that has these labels."""
        found = self._all[metric]
        assert isinstance(found, Histogram)
        return found.labels(*labels) if labels else found

    def watch(self, metric: Metric, read: Callable[[], float], *labels: str) -> None:
        """Have a gauge read when somebody asks for it, from any thread."""
        found = self._all[metric]
        assert isinstance(found, Gauge)
        (found.labels(*labels) if labels else found).set_function(read)

    def families(self) -> Iterator[tuple[Metric, Family]]:
        """What each metric holds now."""
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

"""What a service records into: the list's metrics as Prometheus keeps them.

One store for all readers. Recording takes a lock and an addition, about 0.6 µs; the SDK's own
instruments take 5 µs, and have no histogram that is only looked at when somebody asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)
from prometheus_client.metrics_core import Metric as Family

from tandem.telemetry.metrics import METRICS, Kind, Metric, underscored

_Instrument = Counter | Gauge | Histogram


class Instruments:
    """The metrics of one service, all there from the start.

    Attributes:
        role: of the service.
        registry: for whoever writes Prometheus' formats.
        started_ns: when counting began, by time.time_ns().
    """

    def __init__(self, role: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a line a series that nobody reads
        self.role = role
        self.registry = CollectorRegistry()
        self.started_ns = time.time_ns()
        self._all = {
            metric: _instrument(metric, self.registry) for metric in METRICS if role in metric.roles
        }

    def counter(self, metric: Metric, *labels: str) -> Counter:
        """A counter, or the one of its series that has these labels."""
        found = self._all[metric]
        assert isinstance(found, Counter)
        return found.labels(*labels) if labels else found

    def histogram(self, metric: Metric, *labels: str) -> Histogram:
        """A histogram, or the one of its series that has these labels."""
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
    names = (underscored(metric.name), metric.meaning, tuple(map(underscored, metric.labels)))
    unit = metric.prometheus_unit
    if metric.kind is Kind.COUNTER:
        return Counter(*names, unit=unit, registry=registry)
    if metric.kind is Kind.GAUGE:
        return Gauge(*names, unit=unit, registry=registry)
    return Histogram(*names, unit=unit, registry=registry, buckets=metric.buckets)

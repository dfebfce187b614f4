"""A histogram's observations between two scrapes, over all services together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from tandem.telemetry.metrics.catalog import Metric
from tandem.tools.watch.scrape import Scrape


@dataclass(frozen=True)
class Histogram:
    """Observations by the upper bounds of the buckets.

    Attributes:
        counts: observations up to each bound, cumulative; the last bound is infinity.
    """

    counts: Mapping[float, float]

    @classmethod
    def of(cls, metric: Metric, scrapes: Iterable[Scrape]) -> Histogram:
        """The sum of a metric's buckets over several scrapes."""
        counts: dict[float, float] = {}
        for scrape in scrapes:
            for labels, value in scrape.series(f"{metric.prometheus_name}_bucket"):
                bound = float(labels["le"])
                counts[bound] = counts.get(bound, 0.0) + value
        return cls(dict(sorted(counts.items())))

    @property
    def count(self) -> float:
        """All observations."""
        return max(self.counts.values(), default=0.0)

    def quantile(self, share: float) -> float | None:
        """A quantile, interpolated linearly between two bounds, as in Prometheus.

        None without observations. A quantile above the last finite bound is that bound.
        """
        if not self.count:
            return None
        wanted = share * self.count
        edges = [(0.0, 0.0), *self.counts.items()]
        for (low, below), (high, upto) in pairwise(edges):
            if upto >= wanted and upto > below:
                if math.isinf(high):
                    return low
                return low + (high - low) * (wanted - below) / (upto - below)
        return edges[-1][0]

    def surely_within(self, limit: float) -> float:
        """Observations that are certainly at most `limit`: those up to the last bound below it."""
        return max((upto for bound, upto in self.counts.items() if bound <= limit), default=0.0)

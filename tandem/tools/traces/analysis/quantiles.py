"""Percentiles of any number of times in bounded memory."""

from __future__ import annotations

import math
from collections import Counter

# A percentile is off by no more than this share of itself.
RELATIVE_ERROR = 0.005
_BASE = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_LOG_BASE = math.log(_BASE)


class Quantiles:
    """Counts times in buckets whose bounds grow by one percent (DDSketch, arXiv 1908.10693).

    From a nanosecond to a day there are some 3,200 buckets.

    Attributes:
        count: number of times.
        total_ns: their sum.
    """

    def __init__(self) -> None:
        self.count = 0
        self.total_ns = 0
        self._buckets: Counter[int] = Counter()

    def add(self, nanoseconds: int) -> None:
        """Count a time; a negative one counts as 0."""
        self.count += 1
        self.total_ns += nanoseconds
        bucket = math.ceil(math.log(nanoseconds) / _LOG_BASE) if nanoseconds > 0 else -1
        self._buckets[bucket] += 1

    def at(self, share: float) -> float:
        """The time that a share of all times do not exceed, nanoseconds; 0 without any."""
        wanted = math.ceil(share * self.count)
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= wanted:
                return 2 * _BASE**bucket / (_BASE + 1) if bucket >= 0 else 0.0
        return 0.0

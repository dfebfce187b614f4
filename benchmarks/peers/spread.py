"""Medians, intervals of medians, and ratios of what was measured in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import median

_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Spread:
    """A median and where the true one is.

    Attributes:
        median: of the values.
        low: of its interval.
        high: of its interval.
        confidence: that the interval holds the true median, whatever the distribution; at least
            0.95, or what the smallest and the largest of too few values give.
        count: of values.
    """

    median: float
    low: float
    high: float
    confidence: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """By order statistics: how many values lie below the true median is binomial."""
        ordered = sorted(values)
        n, outside = len(ordered), 0
        cut, missed = 0, 2 / 2**n
        while cut + 1 < n - 1 - cut:
            outside += comb(n, cut)
            further = 2 * (outside + comb(n, cut + 1)) / 2**n
            if further > 1 - _CONFIDENCE:
                break
            cut, missed = cut + 1, further
        confidence = max(0.0, 1 - missed)
        return cls(median(ordered), ordered[cut], ordered[n - 1 - cut], confidence, n)


def ratios(ours: dict[int, float], theirs: dict[int, float]) -> list[float]:
    """Of the turns that both have; a slow minute lies on both alike."""
    return [ours[turn] / theirs[turn] for turn in sorted(ours.keys() & theirs.keys())]

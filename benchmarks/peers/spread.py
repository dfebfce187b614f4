"""Statistics of measurements taken in turn: medians, intervals, ratios, best draft lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import median

import numpy as np

from benchmarks.peers.way import Way

_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Spread:
    """A median and its confidence interval.

    Attributes:
        median: of the values.
        low: lower end of the interval.
        high: upper end of the interval.
        confidence: that the interval contains the true median, for any distribution; at least
            0.95, unless there are too few values even for their whole range.
        count: number of values.
    """

    median: float
    low: float
    high: float
    confidence: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """By order statistics: the number of values below the true median is binomial."""
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
    """Ratios within the turns that both have; a slow minute affects both alike."""
    return [ours[turn] / theirs[turn] for turn in sorted(ours.keys() & theirs.keys())]


def best_gammas(speeds: Mapping[Way, Mapping[int, float]]) -> dict[str, int]:
    """The fastest draft length of each family.

    Speeds are compared within turns: each way's speed is divided by the (geometric) mean of its
    family's ways in that turn, so that slow minutes weigh no more than others; then the median over
    turns is taken. A way that lacks a turn is judged by the turns it has.

    Args:
        speeds: tokens a second by turn, of ways with drafts.
    """
    drafted = [way for way in speeds if way.gamma]
    return {
        family: _best([way for way in drafted if way.family == family], speeds)
        for family in sorted({way.family for way in drafted})
    }


def _best(ways: Sequence[Way], speeds: Mapping[Way, Mapping[int, float]]) -> int:
    turns = sorted({turn for way in ways for turn in speeds[way]})
    logs = np.array([[np.log(speeds[way].get(turn, np.nan)) for turn in turns] for way in ways])
    relative = logs - np.nanmean(logs, axis=0)
    return ways[int(np.nanargmax(np.nanmedian(relative, axis=1)))].gamma

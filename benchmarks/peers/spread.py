"""What was measured in turn: medians and their intervals, ratios, the best draft length."""

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


def best_gammas(speeds: Mapping[Way, Mapping[int, float]]) -> dict[str, int]:
    """The draft length of each family that is fastest, turn by turn.

    A turn counts for its ratios only: every way's speed over the mean of its family's ways in
    that turn (geometric), so that slow minutes weigh no more than others; then the median over
    turns. A way that lacks a turn is judged by those it has.

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

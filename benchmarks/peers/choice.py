"""Each engine's best draft length for a load, from turns that are then measured anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.peers.way import Way


def best_gammas(speeds: Mapping[Way, Mapping[int, float]]) -> dict[str, int]:
    """The draft length of each engine that is fastest, turn by turn.

    A turn counts for its ratios only: every way's speed over the mean of its engine's ways in
    that turn (geometric), so that slow minutes weigh no more than others; then the median over
    turns. A way that lacks a turn is judged by those it has.

    Args:
        speeds: tokens a second by turn, of ways with drafts.
    """
    engines = sorted({way.engine for way in speeds if way.gamma})
    return {
        engine: _best([way for way in speeds if way.engine == engine and way.gamma], speeds)
        for engine in engines
    }


def _best(ways: Sequence[Way], speeds: Mapping[Way, Mapping[int, float]]) -> int:
    turns = sorted({turn for way in ways for turn in speeds[way]})
    logs = np.array([[np.log(speeds[way].get(turn, np.nan)) for turn in turns] for way in ways])
    relative = logs - np.nanmean(logs, axis=0)
    return ways[int(np.nanargmax(np.nanmedian(relative, axis=1)))].gamma

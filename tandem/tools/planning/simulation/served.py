"""Latencies and rates of a simulated fleet."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_Times = NDArray[np.float64]
# Shares of texts to skip at the beginning and at the end, while the queues fill and run empty.
_WARM_UP, _RUN_OUT = 0.25, 0.1


@dataclass(frozen=True)
class RunFigures:
    """Figures of a run without its beginning and its end. Times are seconds.

    Attributes:
        ttft: of each text.
        tpot: of each text; 0 for one of a single token.
        latency: of each text.
        texts_per_s: texts that ended, a second.
        tokens_per_s: their tokens, a second.
        slots_held: share of the targets' slots that were in use.
        target_busy: share of the time that the targets' engines were in a pass.
        drafter_busy: share of the time that the drafters' engines were in a pass.
    """

    ttft: _Times
    tpot: _Times
    latency: _Times
    texts_per_s: float
    tokens_per_s: float
    slots_held: float
    target_busy: float
    drafter_busy: float


def steady(
    arrived: _Times,
    first: _Times,
    ended: _Times,
    tokens: NDArray[np.int64],
    *in_use: float,
) -> RunFigures:
    """The figures between the beginning and the end of a run.

    Args:
        arrived: when each text arrived.
        first: time of its first token.
        ended: time of its last token.
        tokens: its number of tokens.
        in_use: the last three attributes of `RunFigures`.
    """
    number = len(arrived)
    inside = slice(int(number * _WARM_UP), max(int(number * (1 - _RUN_OUT)), 1))
    by_arrival = np.argsort(arrived, kind="stable")[inside]
    # Rates are taken between ends of texts, since a closed loop's texts all begin at once.
    by_end = np.argsort(ended, kind="stable")[inside]
    span = float(ended[by_end[-1]] - ended[by_end[0]]) if len(by_end) > 1 else 0.0
    later = np.maximum(tokens - 1, 1)
    tpot = np.where(tokens > 1, (ended - first) / later, 0.0)
    return RunFigures(
        (first - arrived)[by_arrival],
        tpot[by_arrival],
        (ended - arrived)[by_arrival],
        (len(by_end) - 1) / span if span else 0.0,
        float(tokens[by_end[1:]].sum()) / span if span else 0.0,
        *in_use,
    )

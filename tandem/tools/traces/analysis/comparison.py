"""What moved between two recordings, and whether chance alone could explain it.

Requests are resampled from each recording (the bootstrap), and the difference of every line is
computed each time. The intervals are simultaneous: in 95 of 100 comparisons, all of them contain
their true values at once (by the studentised maximum over all lines). With separate intervals, a
table of thirty lines would show a difference or two between any two runs.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from tandem.tools.traces.analysis.figures import RequestFigures
from tandem.tools.traces.analysis.stages import STAGES

_LEVEL = 0.95
_RESAMPLES = 2_000
_AT_ONCE = 100
_LAST_DIGIT = 1e-9
# Requests that are kept of each recording; 20,000 rows of forty numbers are 7 MB.
MAX_REQUESTS = 20_000
# With fewer, resampling says nothing about other requests.
MIN_REQUESTS = 8

_Array = NDArray[np.float64]


class Unit(Enum):
    """What a stage's time is divided by."""

    ROUND = "round"
    TOKEN = "token"


@dataclass(frozen=True)
class Line:
    """One figure of two recordings.

    Attributes:
        name: of the figure, with its unit.
        before: in the first recording.
        after: in the second recording.
        low: lower end of the interval of after - before; None with too few requests.
        high: its upper end.
    """

    name: str
    before: float
    after: float
    low: float | None
    high: float | None

    @property
    def moved(self) -> bool | None:
        """Whether the interval excludes zero; None without an interval."""
        if self.low is None or self.high is None:
            return None
        return not self.low <= 0 <= self.high


class RequestSample:
    """A uniform sample of a recording's requests (algorithm R); all of them if they are few.

    Args:
        figures: of the requests, in any order.
        seed: of the choice.
    """

    def __init__(self, figures: Iterable[RequestFigures], seed: int) -> None:
        self.count = 0
        chosen: list[list[float]] = []
        numbers = random.Random(seed)
        for each in figures:
            self.count += 1
            if len(chosen) < MAX_REQUESTS:
                chosen.append(_columns(each))
            elif (place := numbers.randrange(self.count)) < MAX_REQUESTS:
                chosen[place] = _columns(each)
        self.rows: _Array = np.array(chosen, dtype=np.float64).reshape(len(chosen), -1)


_COUNTS = ("requests", "firsts", "wall_s", "first_ms", "tokens", "rounds", "drafted", "accepted")


def _columns(figures: RequestFigures) -> list[float]:
    """A request as numbers that can be summed over requests."""
    first = figures.first_token_ns
    return [
        1.0,
        float(first is not None),
        figures.wall_ns / 1e9,
        (first or 0) / 1e6,
        float(figures.tokens),
        float(figures.rounds),
        float(figures.drafted),
        float(figures.accepted),
        *(figures.stages.get(stage, 0) / 1e6 for stage in STAGES),
    ]


@dataclass(frozen=True)
class _Ratio:
    """A figure: one sum over requests divided by another."""

    name: str
    above: int
    below: int
    plus: float = 0.0


def _ratios(unit: Unit) -> list[_Ratio]:
    at = {name: index for index, name in enumerate(_COUNTS)}
    ratios = [
        _Ratio("tokens/s of a request", at["tokens"], at["wall_s"]),
        _Ratio("first token ms", at["first_ms"], at["firsts"]),
        _Ratio("acceptance", at["accepted"], at["drafted"]),
        _Ratio("tokens a round", at["accepted"], at["rounds"], 1.0),
        _Ratio("rounds a request", at["rounds"], at["requests"]),
        _Ratio("tokens a request", at["tokens"], at["requests"]),
    ]
    for index, stage in enumerate(STAGES, len(_COUNTS)):
        below = "rounds" if stage.in_round else "requests"
        if unit is Unit.TOKEN:
            below = "tokens"
        ratios.append(_Ratio(f"{stage} ms/{below[:-1]}", index, at[below]))
    return ratios


def compare(before: RequestSample, after: RequestSample, unit: Unit, seed: int) -> list[Line]:
    """A line for each figure that either recording has.

    Args:
        before: the first recording.
        after: the second.
        unit: what the stages' times are divided by.
        seed: of the bootstrap.
    """
    ratios = [r for r in _ratios(unit) if _known(before, r) or _known(after, r)]
    first, second = (_values(side.rows.sum(axis=0)[None], ratios)[0] for side in (before, after))
    if min(len(before.rows), len(after.rows)) < MIN_REQUESTS:
        return [
            Line(ratio.name, b, a, None, None)
            for ratio, b, a in zip(ratios, first.tolist(), second.tolist(), strict=True)
        ]
    numbers = np.random.default_rng(seed)
    drawn = _resampled(after.rows, ratios, numbers) - _resampled(before.rows, ratios, numbers)
    low, high = _together(drawn, second - first)
    columns = (first, second, low, high)
    return [
        Line(ratio.name, *values)
        for ratio, *values in zip(ratios, *(c.tolist() for c in columns), strict=True)
    ]


def _known(side: RequestSample, ratio: _Ratio) -> bool:
    sums = side.rows.sum(axis=0)
    return bool(sums[ratio.below] > 0 and (sums[ratio.above] > 0 or ratio.plus))


def _values(sums: _Array, ratios: Sequence[_Ratio]) -> _Array:
    """Figures [N, R] of sums over requests [N, C]; 0 where the divisor is 0."""
    above = sums[:, [ratio.above for ratio in ratios]]
    below = sums[:, [ratio.below for ratio in ratios]]
    plus = np.array([ratio.plus for ratio in ratios])
    return np.where(below > 0, above / np.where(below > 0, below, 1.0) + plus, 0.0)


def _resampled(rows: _Array, ratios: Sequence[_Ratio], numbers: np.random.Generator) -> _Array:
    """Figures [resamples, R] of requests [N, C] that are drawn with replacement."""
    found = []
    even = np.full(len(rows), 1 / len(rows))
    for _ in range(_RESAMPLES // _AT_ONCE):
        weights = numbers.multinomial(len(rows), even, size=_AT_ONCE).astype(np.float64)
        found.append(_values(weights @ rows, ratios))
    return np.concatenate(found)


def _together(drawn: _Array, seen: _Array) -> tuple[_Array, _Array]:
    """Bounds [R] of intervals that all hold at once, from differences [resamples, R]."""
    spread = drawn.std(axis=0)
    safe = np.where(spread > 0, spread, 1.0)
    furthest = (np.abs(drawn - seen) / safe).max(axis=1)
    reach = np.quantile(furthest, _LEVEL) * spread
    # Equal requests have no spread, but sums in another order differ in the last digit.
    reach = np.maximum(reach, _LAST_DIGIT)
    return seen - reach, seen + reach

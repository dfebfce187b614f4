"""Compares back ends by what they are to serve: few texts and many, with drafts and without."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median

import structlog

from tandem.inference.choice.speed import CONTEXT, ROWS, SEQUENCES, begun, timed
from tandem.inference.passes.backend import Backend
from tandem.profile import PassTime, Profile

_log = structlog.get_logger(__name__)

# Texts at once. More than are measured follow from those that are.
LOADS = (1, 4, 16, 64)
# Drafted tokens of a round, and the chance that each is accepted after those before it.
_GAMMAS, _ACCEPTANCE = (4, 16), 0.8
# A model that drafts reads the tokens of the last round first.
_EMITTED = 3
# Extents are whole blocks, and this is the largest block.
_POSITIONS = 96
_LEAST_ROUNDS, _MOST_ROUNDS, _SECONDS = 3, 9, 12.0
# Of two back ends the earlier one is taken, unless the later one is this much cheaper: what is
# closer depends on the moment.
_WORTHWHILE = 1.1

_PassTimes = dict[tuple[int, int], float]


@dataclass(frozen=True)
class BackendComparison:
    """How back ends compare.

    Attributes:
        best: index of the one to take.
        lead: cost of the cheapest other one over that of `best`.
        sure: whether `best` was the cheapest in each round.
        profile: what passes of `best` take.
    """

    best: int
    lead: float
    sure: bool
    profile: list[PassTime]


def costs_of(passes: Sequence[PassTime], drafts: bool) -> list[float]:
    """Nanoseconds for a token, by what passes take.

    Args:
        passes: measured.
        drafts: whether the model drafts, or writes texts.

    Returns:
        For each load the cost without drafts, then the cost with drafts of the better length: the
        orchestrator takes none where these cost more. For a model that drafts, that of a draft.
    """
    at = Profile(passes).at
    if drafts:
        return [
            (at(texts, _EMITTED) + (_GAMMAS[0] - 1) * at(texts, 1)) / (texts * _GAMMAS[0])
            for texts in LOADS
        ]
    costs = []
    for texts in LOADS:
        plain = at(texts, 1) / texts
        drafted = [at(texts, gamma + 1) / (texts * _emitted(gamma)) for gamma in _GAMMAS]
        costs += [plain, min(plain, *drafted)]
    return costs


def _emitted(gamma: int) -> float:
    """Mean tokens of a round."""
    return (1 - _ACCEPTANCE ** (gamma + 1)) / (1 - _ACCEPTANCE)


def compare(backends: Sequence[Backend], drafts: bool) -> BackendComparison:
    """Measure passes in turn, round by round, until the same one has been the cheapest in each.

    Where two are close, or the machine is busy, it goes on for as long as there is time for. A
    large model is measured with fewer texts.

    Args:
        backends: the first one serves meanwhile.
        drafts: see `costs_of`.
    """
    apart = [each.beside(SEQUENCES[-1] * _POSITIONS) for each in backends]
    texts = [begun(each, SEQUENCES[-1]) for each in apart]
    until = time.perf_counter() + _SECONDS
    levels: Sequence[int] = SEQUENCES
    rounds: list[list[_PassTimes]] = []
    costs: list[list[float]] = []
    while len(rounds) < _MOST_ROUNDS:
        found: list[_PassTimes] = [{} for _ in apart]
        began = time.perf_counter()
        for level in levels:
            started = time.perf_counter()
            for rows in ROWS:
                for each, caches, times in zip(apart, texts, found, strict=True):
                    times[level, rows] = _second(each, caches[:level], rows)
            now = time.perf_counter()
            # The next level takes about four times as long.
            if not rounds and _LEAST_ROUNDS * (now - began + 4 * (now - started)) > _SECONDS:
                levels = levels[: levels.index(level) + 1]
                break
        rounds.append(found)
        costs.append([geometric_mean(costs_of(_listed(times), drafts)) for times in found])
        if len(rounds) >= _LEAST_ROUNDS and (_same(costs) or time.perf_counter() > until):
            break
    return _outcome(apart, rounds, costs, drafts)


def _second(backend: Backend, caches: Sequence[object], rows: int) -> float:
    """Nanoseconds of a pass after another of its size: OpenVINO takes longer for the first."""
    timed(backend, caches, (rows,), CONTEXT)
    return 1e9 * timed(backend, caches, (rows,), CONTEXT)


def _same(costs: Sequence[Sequence[float]]) -> bool:
    """Whether one leads in each round, by enough to matter."""
    leaders = {each.index(min(each)) for each in costs}
    if len(leaders) > 1:
        return False
    return median(sorted(each)[1] / min(each) for each in costs) > _WORTHWHILE


def _outcome(
    backends: Sequence[Backend],
    rounds: Sequence[Sequence[_PassTimes]],
    costs: Sequence[Sequence[float]],
    drafts: bool,
) -> BackendComparison:
    profiles = [
        {shape: min(found[i][shape] for found in rounds) for shape in rounds[0][i]}
        for i in range(len(backends))
    ]
    means = [median(each[i] / each[0] for each in costs) for i in range(len(backends))]
    best = 0
    for i, mean in enumerate(means):
        if mean * _WORTHWHILE < means[best]:
            best = i
    sure = all(each.index(min(each)) == best for each in costs)
    _log.info(
        "back ends compared: ms for a token"
        + (" of a draft" if drafts else ", plain and drafted")
        + f", at {', '.join(map(str, LOADS))} texts",
        taken=str(backends[best]),
        rounds=len(rounds),
        **{
            str(each): [round(cost / 1e6, 2) for cost in costs_of(_listed(times), drafts)]
            for each, times in zip(backends, profiles, strict=True)
        },
    )
    lead = min(mean for i, mean in enumerate(means) if i != best) / means[best]
    return BackendComparison(best, lead, sure, _listed(profiles[best]))


def _listed(times: _PassTimes) -> list[PassTime]:
    return [(sequences, rows, ns) for (sequences, rows), ns in times.items()]

"""The time of a round at another draft length or batch size, from recorded rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tandem.tools.traces.analysis.attribution import OwnedInterval
from tandem.tools.traces.analysis.batches import PassWaits
from tandem.tools.traces.analysis.stages import OwnedStage
from tandem.tools.traces.read.request import TracedRequest

# A mean of fewer rounds is too uncertain to draw a line through.
MIN_ROUNDS = 50
_DRAWN, _REST = "draft.draw", "draft.else"
_PASSES = ("draft.gather", "draft.forward")


@dataclass
class Costs:
    """Total times of rounds with the same draft length, nanoseconds.

    Attributes:
        rounds: number of rounds.
        stages: times by stage, for stages that occur once per round.
    """

    rounds: int = 0
    stages: dict[OwnedStage, int] = field(default_factory=dict)

    def mean_ns(self, *names: str) -> float:
        """Mean time per round of the stages of these names, whichever service they are in."""
        spent = sum(ns for stage, ns in self.stages.items() if stage.name in names)
        return spent / self.rounds if self.rounds else 0.0

    @property
    def round_ns(self) -> float:
        """Mean time of a round, over all of its stages."""
        return sum(self.stages.values()) / self.rounds if self.rounds else 0.0

    def add(self, other: Costs) -> None:
        """Add other rounds."""
        self.rounds += other.rounds
        for stage, spent in other.stages.items():
            self.stages[stage] = self.stages.get(stage, 0) + spent


def costs_by_gamma(request: TracedRequest, path: Sequence[OwnedInterval]) -> dict[int, Costs]:
    """Costs of a request's rounds, by draft length.

    The last rounds, whose drafts were cut to the tokens that were left, count as length 0: they
    are not typical of rounds with short drafts.
    """
    rounds = list(request.rounds())
    asked = max((round_.gamma for round_ in rounds), default=0)
    whole = max((i for i, round_ in enumerate(rounds) if round_.gamma == asked), default=-1)
    found: dict[int, Costs] = {}
    segments = iter(path)
    segment = next(segments, None)
    for number, round_ in enumerate(rounds):
        costs = found.setdefault(round_.gamma if number <= whole else 0, Costs())
        costs.rounds += 1
        while segment is not None and segment.start_ns < round_.span.end_ns:
            if segment.start_ns >= round_.span.start_ns and segment.stage.in_round:
                spent = costs.stages.get(segment.stage, 0) + segment.duration_ns
                costs.stages[segment.stage] = spent
            segment = next(segments, None)
    return found


class Curve:
    """A mean time as a function of draft length or batch size, inter- and extrapolated.

    Args:
        means: recorded means, by length or size; at least one.
        weights: number of rounds of each mean.
    """

    def __init__(self, means: Mapping[float, float], weights: Mapping[float, int]) -> None:
        self._at = np.array(sorted(means))
        rounds = np.array([weights[at] for at in self._at], dtype=np.float64)
        self._means = _never_falling(np.array([means[at] for at in self._at]), rounds)
        spread = self._at - np.average(self._at, weights=rounds)
        below = float((rounds * spread**2).sum())
        self._slope = float((rounds * spread * self._means).sum()) / below if below else 0.0

    def at(self, x: float) -> float:
        """Linear between recorded means; beyond them, with the slope of a line fitted to all."""
        inside = float(np.interp(x, self._at, self._means))
        beyond = x - min(max(x, self._at[0]), self._at[-1])
        return max(inside + self._slope * float(beyond), 0.0)


def _never_falling(means: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Means pooled until none is below the one before: more work is never quicker."""
    pools: list[tuple[float, float, int]] = []
    for mean, weight in zip(means.tolist(), weights.tolist(), strict=True):
        count = 1
        while pools and pools[-1][0] > mean:
            before, heavy, more = pools.pop()
            mean = (mean * weight + before * heavy) / (weight + heavy)
            weight, count = weight + heavy, count + more
        pools.append((mean, weight, count))
    return np.array([mean for mean, _, count in pools for _ in range(count)])


class GammaCosts:
    """The time of a round at any draft length.

    Args:
        recorded: costs of all rounds with a draft, by its length.
        base: the length whose rounds are used however few they are.
    """

    def __init__(self, recorded: Mapping[int, Costs], base: int) -> None:
        self._base = base
        self._often = {
            gamma: costs
            for gamma, costs in recorded.items()
            if gamma == base or (gamma and costs.rounds >= MIN_ROUNDS)
        }
        self.gammas = sorted(self._often)
        self._curve = Curve(
            {float(gamma): costs.round_ns for gamma, costs in self._often.items()},
            {float(gamma): costs.rounds for gamma, costs in self._often.items()},
        )

    @property
    def assumption(self) -> str:
        """How times at other lengths are predicted."""
        if len(self.gammas) > 1:
            gammas = ", ".join(map(str, self.gammas))
            return (
                f"a round's time at another gamma lies on lines through those recorded at {gammas};"
                " a shorter draft saves its drafting at most"
            )
        return (
            f"only gamma {self._base} was recorded: drafting takes gamma times as long, and the"
            " target's pass as long as now"
        )

    def round_ns(self, gamma: int) -> float:
        """Mean time of a round with a draft of this length."""
        near = min(max(gamma, self.gammas[0]), self.gammas[-1])
        if near == gamma:
            return self._curve.at(gamma)
        costs = self._often[near]
        each = [*_PASSES, _DRAWN if costs.mean_ns(_DRAWN) else _REST]
        passes_alike = self._curve.at(near) + (gamma / near - 1) * costs.mean_ns(*each)
        # A line through neighbouring lengths may be steep by chance.
        return passes_alike if len(self.gammas) == 1 else max(self._curve.at(gamma), passes_alike)


def batch_curve(waits: Mapping[tuple[str, int], PassWaits], step: str) -> Curve | None:
    """Time of a step's passes by batch size; None if fewer than two sizes were recorded."""
    often = {
        float(size): found
        for (name, size), found in waits.items()
        if name == step and size and found.steps >= MIN_ROUNDS
    }
    if len(often) < 2:
        return None
    means = {size: found.forward_ns / found.steps for size, found in often.items()}
    return Curve(means, {size: found.steps for size, found in often.items()})


def mean_batch(waits: Mapping[tuple[str, int], PassWaits], step: str) -> float:
    """Mean batch size of a step's passes; 0 if unknown."""
    known = [(size, w.steps) for (name, size), w in waits.items() if name == step and size]
    steps = sum(count for _, count in known)
    return sum(size * count for size, count in known) / steps if steps else 0.0

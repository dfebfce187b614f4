"""The smallest fleet that holds an objective at a rate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from tandem.failure import Failure
from tandem.load.objective import Objective
from tandem.planning.measurement import Measurement
from tandem.planning.pace import Pace, ratio_of
from tandem.planning.served import Served
from tandem.planning.texts import Texts

# A plan of more is a plan for another tool.
MOST_TARGETS = 16_384
_LONGEST_GAMMA = 16
# Of a run: a 99th percentile has some twenty texts behind it, and the queues have come to rest; the
# most take some ten seconds.
_FEWEST_TEXTS, _MOST_TEXTS = 2_000, 300_000
_LATENCIES = 8
# Targets in a slice, at most: half as many at least, so that its rounding is 3 % of the fleet.
_SLICE = 64
# How often a fleet may grow by a slice's rounding.
_MORE_TIMES = 8
# Beyond what a drafter is busy with when all goes evenly.
_DRAFTER_ROOM = 1.25
# Of an orchestrator's one event loop, that texts may keep it at work: above, they wait for it.
_ORCHESTRATOR_SHARE = 0.5


@dataclass(frozen=True)
class Need:
    """What is wanted.

    Attributes:
        rate: texts a second.
        objective: that they have to keep.
        slots: texts that a target holds.
        gather: as the services' setting of that name.
        seed: of everything random.
    """

    rate: float
    objective: Objective
    slots: int = 64
    gather: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Sized:
    """A fleet that does it.

    Attributes:
        gamma: draft length.
        targets: replicas.
        drafters: replicas; 0 with gamma 0.
        orchestrators: replicas.
        served: what texts see.
        good: share of them that keep the objective.
        orchestrator_busy: share of their time that orchestrators are at work.
    """

    gamma: int
    targets: int
    drafters: int
    orchestrators: int
    served: Served
    good: float
    orchestrator_busy: float

    @property
    def busy(self) -> dict[str, float]:
        """How much of each thing is in use; the first is what bounds the fleet."""
        shares = {
            "the targets' engines": self.served.target_busy,
            "the drafters' engines": self.served.drafter_busy,
            "the orchestrators": self.orchestrator_busy,
            "the batch slots": self.served.slots_held,
        }
        return dict(sorted(shares.items(), key=lambda item: -item[1]))


def good_share(served: Served, objective: Objective) -> float:
    """Share of texts that keep an objective."""
    good = np.ones(len(served.ttft), dtype=bool)
    for times, limit in (
        (served.ttft, objective.ttft_ms),
        (served.tpot, objective.tpot_ms),
        (served.latency, objective.latency_ms),
    ):
        if limit is not None:
            good &= times * 1e3 <= limit
    return float(good.mean())


def likely_gamma(
    measured: Measurement, target_price: float, drafter_price: float, slots: int
) -> int:
    """The draft length whose tokens cost least where targets and drafters hold full batches."""

    def cost(gamma: int) -> float:
        batch = min(slots, 16)
        spent = measured.verify.at(batch) * target_price
        spent += gamma * measured.draft.at(batch) * drafter_price
        return spent / measured.tokens_a_round(gamma)

    return min(range(1, min(_LONGEST_GAMMA, len(measured.shares)) + 1), key=cost)


def ratio_for(measured: Measurement, gamma: int, slots: int) -> Fraction:
    """Drafters for each target, so that they are no busier than it."""
    if not gamma:
        return Fraction(0)
    batch = min(slots, 16)
    share = gamma * measured.draft.at(batch) / max(measured.verify.at(batch), 1e-9)
    return ratio_of(share * _DRAFTER_ROOM)


class Sizing:
    """The fewest targets at a draft length, with drafters in proportion.

    They are looked for by bisection in a slice of the fleet, of at most 64 targets with their share
    of the texts; then the whole fleet is simulated. More replicas share a load more evenly, so
    that a slice errs towards more.

    Attributes:
        targets: by the slice.
        drafters: in proportion.

    Args:
        measured: times and acceptance.
        need: what is wanted.
        gamma: draft length.

    Raises:
        Failure: no number of targets holds the objective.
    """

    def __init__(self, measured: Measurement, need: Need, gamma: int) -> None:
        self._measured, self._need = measured, need
        ratio = ratio_for(measured, gamma, need.slots)
        self._pace = Pace(measured, ratio, gamma, need.slots, need.gather, need.seed)
        self._runs = _Sliced(measured, self._pace, need)
        self.targets = self._runs.fewest()

    @property
    def drafters(self) -> int:
        """See there."""
        return math.ceil(self.targets * self._pace.drafters_each)

    def sized(self) -> Sized:
        """By the whole fleet, a few more where the slice was too few.

        Raises:
            Failure: it takes more than a few.
        """
        for _ in range(_MORE_TIMES):
            served = self._runs.run(self.targets, 1)
            if served is not None and self._runs.holds(served):
                return _sized(self._measured, self._need, self._pace, self.targets, served)
            self.targets += max(self.targets // _SLICE, 1)
        raise Failure(f"{self.targets} targets do not hold {self._need.objective}")


class _Sliced:
    """Runs of a fleet, or of an equal part of it.

    Args:
        measured: for what texts are like.
        pace: of targets with their drafters.
        need: what is wanted.
    """

    def __init__(self, measured: Measurement, pace: Pace, need: Need) -> None:
        self._measured, self._pace, self._need = measured, pace, need
        self._tokens = sum(text.new_tokens for text in measured.texts) / len(measured.texts)

    def run(self, targets: int, parts: int) -> Served | None:
        """A part of a fleet; None where the texts would become ever more.

        Args:
            targets: of the part.
            parts: that the fleet, and its load, is divided into.
        """
        rate = self._need.rate / parts
        texts = self._pace.needed(rate * self._tokens / targets)
        if texts is None:
            return None
        level = self._pace.nearest(texts)
        latency = float(np.mean(level.ttft)) + self._tokens / level.tokens_per_s
        count = min(max(int(_LATENCIES * rate * latency), _FEWEST_TEXTS), _MOST_TEXTS)
        return Texts(self._measured, self._pace, targets, rate, count, self._need.seed).run()

    def holds(self, served: Served) -> bool:
        """Whether enough texts are good."""
        return good_share(served, self._need.objective) >= self._need.objective.share

    def fewest(self) -> int:
        """Targets, by doubling and bisection, in slices once they are many.

        Raises:
            Failure: no number of them does.
        """
        low, high, parts = 0, 1, 1
        while True:
            served = self.run(high, parts)
            if served is not None and self.holds(served):
                break
            low, high = high, 2 * high
            if high > _SLICE:
                low, high, parts = low // 2, high // 2, parts * 2
            if high * parts > MOST_TARGETS:
                good = "not all of the texts can be served"
                if served is not None:
                    share = good_share(served, self._need.objective)
                    good = f"{share:.1%} of the texts are good"
                raise Failure(
                    f"with {MOST_TARGETS} targets {good}, and good is {self._need.objective}"
                )
        while high - low > 1:
            middle = (low + high) // 2
            served = self.run(middle, parts)
            if served is not None and self.holds(served):
                high = middle
            else:
                low = middle
        return high * parts


def _sized(measured: Measurement, need: Need, pace: Pace, targets: int, served: Served) -> Sized:
    gamma = pace.gamma
    rounds = measured.rounds(gamma)
    work = measured.orchestrator_text_s + rounds * measured.orchestrator_round_s
    orchestrators = max(math.ceil(need.rate * work / _ORCHESTRATOR_SHARE), 1)
    return Sized(
        gamma,
        targets,
        math.ceil(targets * pace.drafters_each),
        orchestrators,
        served,
        good_share(served, need.objective),
        need.rate * work / orchestrators,
    )

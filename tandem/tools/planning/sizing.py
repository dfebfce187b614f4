"""The smallest fleet that holds an objective at a rate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from tandem.failure import Failure
from tandem.tools.load.objective import Objective
from tandem.tools.planning.bound import DRAFTERS, SLOTS, TARGETS, binding, spent
from tandem.tools.planning.measured.measurement import Measurement
from tandem.tools.planning.simulation.pace import Pace, ratio_of
from tandem.tools.planning.simulation.served import RunFigures
from tandem.tools.planning.simulation.texts import SimulatedTexts

# A plan of more is a plan for another tool.
MOST_TARGETS = 16_384
_LONGEST_GAMMA = 16
# Of a run: a 99th percentile has some twenty texts behind it, and the queues have come to rest.
_FEWEST_TEXTS = 2_000
_LATENCIES = 8
# Of the runs that look for a fleet, and of the last one. All of a plan's take some ten seconds.
_MOST_TEXTS_LOOKING, _MOST_TEXTS = 8_000, 60_000
# Targets of a run that looks for a fleet, at most.
_SLICE = 64
# To which share of itself a fleet is found, and by which it may grow a few times afterwards.
_CLOSE = 1 / 64
_MORE_TIMES = 4
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
        bound: what fewer targets would lack.
        simulated: targets that were simulated for `served`.
        texts: that they were given.
    """

    gamma: int
    targets: int
    drafters: int
    orchestrators: int
    served: RunFigures
    good: float
    orchestrator_busy: float
    bound: str
    simulated: int
    texts: int

    @property
    def busy(self) -> dict[str, float]:
        """How much of each thing is in use, most first."""
        shares = {
            TARGETS: self.served.target_busy,
            DRAFTERS: self.served.drafter_busy,
            "the orchestrators": self.orchestrator_busy,
            SLOTS: self.served.slots_held,
        }
        return dict(sorted(shares.items(), key=lambda item: -item[1]))


def good_share(served: RunFigures, objective: Objective) -> float:
    """Share of texts that keep an objective."""
    good = np.ones(len(served.ttft), dtype=bool)
    for share in spent(served, objective).values():
        good &= share <= 1
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

    They are looked for by bisection with a slice of each fleet: some of its targets, with their
    share of the texts. Then as much as may be of the fleet that was found is simulated. More
    replicas share a load more evenly, so that a slice errs towards more.

    Attributes:
        targets: by the slices.
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
        self._runs = _Slices(measured, self._pace, need)
        self.targets, self._failed = self._runs.fewest()

    @property
    def drafters(self) -> int:
        """See there."""
        return math.ceil(self.targets * self._pace.drafters_each)

    def sized(self) -> Sized:
        """By the whole fleet, or its largest slice that may be; a few more where that shows it.

        Raises:
            Failure: it takes more than a few.
        """
        for _ in range(_MORE_TIMES):
            run = self._runs.run(self.targets, self.targets, _MOST_TEXTS)
            if run is not None and self._runs.holds(run):
                fewer = self._failed.served if self._failed else None
                bound = binding(self._pace, self._need.objective, self.targets, run.served, fewer)
                return _sized(self._measured, self._need, self._pace, self.targets, run, bound)
            self._failed = run
            self.targets += math.ceil(self.targets * _CLOSE)
        raise Failure(f"{self.targets} targets do not hold {self._need.objective}")


@dataclass(frozen=True)
class _Run:
    """A slice of a fleet, as it was simulated.

    Attributes:
        targets: of the slice.
        texts: that it was given.
        served: what they saw.
    """

    targets: int
    texts: int
    served: RunFigures


class _Slices:
    """Runs of fleets, or of some of their targets.

    Args:
        measured: for what texts are like.
        pace: of targets with their drafters.
        need: what is wanted.
    """

    def __init__(self, measured: Measurement, pace: Pace, need: Need) -> None:
        self._measured, self._pace, self._need = measured, pace, need

    def run(self, targets: int, slice_: int, most_texts: int) -> _Run | None:
        """A slice of a fleet; None where the texts would become ever more.

        Args:
            targets: of the fleet.
            slice_: targets to simulate, fewer where they would need more texts than they may.
            most_texts: in the run; a single target has as many as it needs.
        """
        tokens, rate = self._measured.mean_tokens, self._need.rate / targets
        texts = self._pace.needed(rate * tokens)
        if texts is None:
            return None
        seen = self._pace.nearest(texts).seen
        latency = float(np.mean(seen.ttft)) + tokens / seen.tokens_per_s
        each = _LATENCIES * rate * latency
        simulated = max(min(slice_, targets, int(most_texts / each)), 1)
        count = max(math.ceil(each * simulated), _FEWEST_TEXTS)
        run = SimulatedTexts(
            self._measured, self._pace, simulated, rate * simulated, count, self._need.seed
        )
        return _Run(simulated, count, run.run())

    def holds(self, run: _Run) -> bool:
        """Whether enough texts are good."""
        return good_share(run.served, self._need.objective) >= self._need.objective.share

    def fewest(self) -> tuple[int, _Run | None]:
        """Targets, by doubling and bisection; and what a few less come to.

        Raises:
            Failure: no number of them does.
        """
        low, high = 0, 1
        failed = None
        while not self._does(run := self._look(high)):
            low, high, failed = high, 2 * high, run
            if high > MOST_TARGETS:
                good = "not all of the texts can be served"
                if run is not None:
                    share = good_share(run.served, self._need.objective)
                    good = f"{share:.1%} of the texts are good"
                raise Failure(
                    f"with {MOST_TARGETS} targets {good}, and good is {self._need.objective}"
                )
        while high - low > max(1, low * _CLOSE):
            middle = (low + high) // 2
            if self._does(run := self._look(middle)):
                high = middle
            else:
                low, failed = middle, run
        return high, failed

    def _look(self, targets: int) -> _Run | None:
        return self.run(targets, _SLICE, _MOST_TEXTS_LOOKING)

    def _does(self, run: _Run | None) -> bool:
        return run is not None and self.holds(run)


def _sized(
    measured: Measurement, need: Need, pace: Pace, targets: int, run: _Run, bound: str
) -> Sized:
    gamma = pace.gamma
    rounds = measured.rounds(gamma)
    work = measured.orchestrator_text_s + rounds * measured.orchestrator_round_s
    orchestrators = max(math.ceil(need.rate * work / _ORCHESTRATOR_SHARE), 1)
    return Sized(
        gamma,
        targets,
        math.ceil(targets * pace.drafters_each),
        orchestrators,
        run.served,
        good_share(run.served, need.objective),
        need.rate * work / orchestrators,
        bound,
        run.targets,
        run.texts,
    )

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

# Larger fleets are beyond this tool.
MOST_TARGETS = 16_384
_LONGEST_GAMMA = 16
# Texts of a run: some twenty lie above the 99th percentile; and latencies that it lasts, so that
# the queues reach their steady state.
_FEWEST_TEXTS = 2_000
_LATENCIES = 8
# Most texts of a run that searches for a fleet, and of the last run. All runs of a plan take some
# ten seconds.
_MOST_TEXTS_LOOKING, _MOST_TEXTS = 8_000, 60_000
# Most targets of a run that searches for a fleet.
_SLICE = 64
# Relative precision of the search; also the step by which a fleet may grow afterwards, at most
# this many times.
_CLOSE = 1 / 64
_MORE_TIMES = 4
# Spare capacity of drafters, relative to a perfectly even load.
_DRAFTER_ROOM = 1.25
# Largest share of its time that an orchestrator's event loop may be busy: above, texts wait for it.
_ORCHESTRATOR_SHARE = 0.5


@dataclass(frozen=True)
class Need:
    """The load and its objective.

    Attributes:
        rate: texts a second.
        objective: that the texts must keep.
        slots: texts that a target holds.
        gather: as the services' setting of that name.
        seed: of all random draws.
    """

    rate: float
    objective: Objective
    slots: int = 64
    gather: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class SizedFleet:
    """A fleet that holds the objective.

    Attributes:
        gamma: draft length.
        targets: replicas.
        drafters: replicas; 0 with gamma 0.
        orchestrators: replicas.
        served: figures of its texts.
        good: share of texts that keep the objective.
        orchestrator_busy: share of the time that orchestrators are busy.
        bound: what fewer targets would lack.
        simulated: targets that were simulated for `served`.
        texts: texts that were simulated.
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
        """The used share of each resource, the largest first."""
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
    """The draft length whose tokens cost least if targets and drafters run full batches."""

    def cost(gamma: int) -> float:
        batch = min(slots, 16)
        spent = measured.verify.at(batch) * target_price
        spent += gamma * measured.draft.at(batch) * drafter_price
        return spent / measured.tokens_a_round(gamma)

    return min(range(1, min(_LONGEST_GAMMA, len(measured.shares)) + 1), key=cost)


def ratio_for(measured: Measurement, gamma: int, slots: int) -> Fraction:
    """Drafters per target, so that drafters are no busier than targets."""
    if not gamma:
        return Fraction(0)
    batch = min(slots, 16)
    share = gamma * measured.draft.at(batch) / max(measured.verify.at(batch), 1e-9)
    return ratio_of(share * _DRAFTER_ROOM)


class Sizing:
    """The fewest targets at a draft length, with drafters in proportion.

    The search bisects, and simulates a slice of each fleet: some of its targets, with their share
    of the texts. Then as much of the found fleet as possible is simulated. More replicas share a
    load more evenly, so a slice overestimates the needed targets.

    Attributes:
        targets: found with slices.
        drafters: in proportion.

    Args:
        measured: times and acceptance.
        need: the load and its objective.
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
        """Drafters for these targets."""
        return math.ceil(self.targets * self._pace.drafters_each)

    def sized(self) -> SizedFleet:
        """Check with the whole fleet, or its largest possible slice; add a few targets if needed.

        Raises:
            Failure: a few more targets are not enough.
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
        texts: simulated texts.
        served: their figures.
    """

    targets: int
    texts: int
    served: RunFigures


class _Slices:
    """Runs of fleets, or of some of their targets.

    Args:
        measured: for the lengths of texts.
        pace: of targets with their drafters.
        need: the load and its objective.
    """

    def __init__(self, measured: Measurement, pace: Pace, need: Need) -> None:
        self._measured, self._pace, self._need = measured, pace, need

    def run(self, targets: int, slice_: int, most_texts: int) -> _Run | None:
        """Simulate a slice of a fleet; None if its queue would grow without end.

        Args:
            targets: of the fleet.
            slice_: most targets to simulate; fewer if they would need more than `most_texts`.
            most_texts: most texts of the run; a single target gets as many as it needs.
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
        """The fewest targets, by doubling and bisection; and the run of slightly fewer targets.

        Raises:
            Failure: no number of targets holds the objective.
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
) -> SizedFleet:
    gamma = pace.gamma
    rounds = measured.rounds(gamma)
    work = measured.orchestrator_text_s + rounds * measured.orchestrator_round_s
    orchestrators = max(math.ceil(need.rate * work / _ORCHESTRATOR_SHARE), 1)
    return SizedFleet(
        gamma=gamma,
        targets=targets,
        drafters=math.ceil(targets * pace.drafters_each),
        orchestrators=orchestrators,
        served=run.served,
        good=good_share(run.served, need.objective),
        orchestrator_busy=need.rate * work / orchestrators,
        bound=bound,
        simulated=run.targets,
        texts=run.texts,
    )

"""Sizes that follow what they earn: tokens over time at the present load, none among them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from orchestrator.acceptance import Acceptance, Chances
from orchestrator.company import Company
from orchestrator.goodput import PLAIN, expected_tokens
from orchestrator.peers import Choice, Decided, Drafted, DraftSize, Expected
from orchestrator.round_times import RoundTimes
from orchestrator.trials import ROUNDS, Trial, Trials

# Goodput is known to a few percent: less than this is no reason for another size.
_WORTH_IT = 1.03
# How a text begins where nothing is known.
_FIRST = 4
# Trials of drafts that are expected to be worse than this are a waste.
_HOPELESS = 0.85
# Ranking takes far longer than all else of a round here, and little changes from one to the next:
# in rounds of a text; and what all of them share, in rounds of each, of several at least.
_RANK_EVERY = 8
_CONSIDER_EVERY, _SEVERAL = 4, 2
# Of several texts there are more rounds than a mean needs.
_TOLD_EVERY = 4
# A forecast is corrected by what came of it, over so many tokens.
_FORECAST = 200.0


class Forecast:
    """How many tokens rounds of a size yielded, over what was expected of them."""

    def __init__(self) -> None:
        self._yielded = self._expected = _FORECAST / 4

    def add(self, expected: float, yielded: float) -> None:
        """Take a round in."""
        keep = 1 - expected / _FORECAST
        self._yielded = self._yielded * keep + yielded
        self._expected = self._expected * keep + expected

    @property
    def factor(self) -> float:
        """What an expectation is to be multiplied by."""
        return self._yielded / self._expected


class Adaptation:
    """What all texts of a pair learn together.

    Attributes:
        acceptance: of drafted tokens.
        times: of rounds.
        trials: of other sizes.
        clock: in nanoseconds.

    Args:
        active: how many texts are being made.
        clock: in nanoseconds.
    """

    def __init__(
        self, active: Callable[[], int], clock: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self.acceptance = Acceptance()
        self.times = RoundTimes()
        self.trials = Trials()
        self.clock = clock
        self.company = Company(clock)
        self._active = active
        self._passed = self._considered = 0  # rounds
        self._drafts: dict[int, tuple[bool, int]] = {}  # by load: found when so many had passed
        self._forecasts: dict[DraftSize, Forecast] = {}

    def policy(self, sizes: Sequence[DraftSize]) -> AdaptiveSize:
        """Of one text, which may choose from these."""
        return AdaptiveSize(self, sizes)

    @property
    def texts(self) -> int:
        """That are being made."""
        return max(self._active(), 1)

    @property
    def load(self) -> int:
        """The same in powers of two: 0 for one, 1 for two, 2 for three or four."""
        return (self.texts - 1).bit_length()

    def forecast(self, size: DraftSize) -> Forecast:
        """Of a size."""
        return self._forecasts.setdefault(size, Forecast())

    def expected(self, size: DraftSize, chances: Chances) -> Expected | None:
        """Of a round; None before any was seen."""
        at = self.times.at(self.load)
        if at is None:
            return None
        tokens = expected_tokens(size, chances) * self.forecast(size).factor
        return Expected(min(max(tokens, 1.0), size.gamma + 1.0), at.wall(size))

    def passed(
        self, size: DraftSize, wall_ns: int, tokens: float, trial: Trial | None, alike: bool
    ) -> None:
        """A round has passed. A trial is charged with what it lost, and with what rounds lost that
        were on beside it.

        Args:
            size: of its draft.
            wall_ns: that it took.
            tokens: that it should yield.
            trial: that it was a part of, or beside.
            alike: whether it was beside rounds of its kind alone.
        """
        self._passed += 1
        if trial is None:
            self.trials.earn(self.load, size, self.texts)
            return
        lost = wall_ns / trial.best.wall_ns - tokens / trial.best.tokens
        self.trials.spend(trial, lost, self.texts)
        if size == trial.size and (alike or not trial.measures):
            trial.left -= 1

    def are_worth_it(self, sizes: Sequence[DraftSize]) -> bool:
        """Whether drafts pay for all texts that are being made, taken together.

        A text whose drafts are taken would have them even where they slow the others by more than
        it gains, so that none of several texts decides it for itself.
        """
        if self.texts == 1:
            return True
        load = self.load
        before, found = self._drafts.get(load, (True, -math.inf))
        if self._passed < found + _CONSIDER_EVERY * max(self.texts, _SEVERAL):
            return before
        chances = self.acceptance.chances(max(size.gamma for size in sizes))
        expected = {size: self.expected(size, chances) for size in sizes}
        goodput = {size: of.goodput for size, of in expected.items() if of is not None}
        plain = goodput.pop(PLAIN, 0.0)
        drafted = max(goodput.values(), default=math.inf)
        after = drafted * (_WORTH_IT if before else 1 / _WORTH_IT) > plain
        self._drafts[load] = after, self._passed
        return after

    def consider(self, sizes: Sequence[DraftSize], best: DraftSize) -> None:
        """Now and then, begin a trial of the most promising size that has not been tried for
        long."""
        texts = self.texts
        if self._passed < self._considered + _CONSIDER_EVERY * max(texts, _SEVERAL):
            return
        self._considered = self._passed
        load, now = self.load, self.clock()
        if self.trials.running(load, now) is not None:
            return
        chances = self.acceptance.chances(max(size.gamma for size in sizes))
        of_best = self.expected(best, chances)
        if of_best is None:
            return
        others = [(size, self.expected(size, chances)) for size in sizes if size != best]
        ranked = [(size, of) for size, of in others if of is not None]
        # What nothing may be slower than comes first, then what promises most.
        ranked.sort(key=lambda other: (other[0] != PLAIN, -other[1].goodput))
        drafted = any(self.times.seen(load, size) >= ROUNDS for size in sizes if size != PLAIN)
        for size, expected in ranked:
            # What promises most is tried once at least: what is known of it may be of other loads.
            wanted = not drafted or expected.goodput > _HOPELESS * of_best.goodput
            seen = self.times.seen(load, size) / texts
            if size != PLAIN:
                drafted = True
                if not wanted:
                    continue
            if not self.trials.stale(load, size, texts, seen):
                continue
            if self.trials.begin(size, load, texts, expected, of_best, now):
                return
        if best == PLAIN and ranked:  # is the drafter good again?
            size, expected = ranked[0]
            self.trials.begin(size, load, texts, expected, of_best, now, sample=True)


class AdaptiveSize:
    """Chooses a text's sizes; made by `Adaptation.policy`.

    Args:
        adaptation: of all texts.
        sizes: to choose from.
    """

    def __init__(self, adaptation: Adaptation, sizes: Sequence[DraftSize]) -> None:
        self._all = adaptation
        self._sizes = list(sizes)
        self._deepest = max(size.gamma for size in sizes)
        self._acceptance = Acceptance(adaptation.acceptance)
        self._best = min(self._sizes, key=lambda size: abs(size.gamma - _FIRST) + bool(size.nodes))
        # Of the round that is on: the size that it teaches something of, what it should yield, the
        # trial that it is in, and the one that it is beside.
        self._size: DraftSize | None = None
        self._tokens = 0.0
        self._trial: Trial | None = None
        self._beside: Trial | None = None
        self._began_ns = 0
        self._chances = self._acceptance.chances(self._deepest)
        self._expected: dict[DraftSize, Expected | None] = {}
        self._drafting: bool | None = None  # in the round that is on
        self._ranked = -_RANK_EVERY, -1  # in which round, under which load
        self._rounds = 0

    @property
    def begins_drafting(self) -> bool:
        """Whether drafts are worth it as things stand."""
        self._rank(self._all.load)
        return self._best != PLAIN

    def choose(self, left: int) -> Choice:
        """The next draft's, with `left` >= 1 tokens still to emit."""
        everyone, load, now = self._all, self._all.load, self._all.clock()
        if self._ranked[0] + _RANK_EVERY <= self._rounds or self._ranked[1] != load:
            self._rank(load)
        self._rounds += 1
        trial = self._beside = everyone.trials.running(load, now)
        joined = trial is not None and trial.size in self._sizes and trial.join(self)
        self._trial = trial if joined else None
        size = cut = self._best
        if self._trial is not None:
            size = cut = self._trial.size
            self._chances = self._acceptance.chances(self._deepest)
        if size.gamma >= left:
            cut = DraftSize(left - 1, size.nodes) if left > 1 else PLAIN
        self._size = size if cut is size else None
        self._tokens = expected_tokens(cut, self._chances)
        self._began_ns = now
        self._drafting = cut.gamma > 0
        everyone.company.enter(self._drafting)
        if cut not in self._expected:
            self._expected[cut] = everyone.expected(cut, self._chances)
        return Choice(cut, self._expected[cut])

    def observe(self, drafted: Drafted | None, decided: Decided) -> None:
        """Learn from a round."""
        everyone, size = self._all, self._size
        among_its_kind = self._leave()
        wall = everyone.clock() - self._began_ns
        if drafted is not None:
            self._acceptance.observe(drafted, decided)
            if size is not None:
                everyone.forecast(size).add(self._tokens, decided.num_accepted + 1)
        elif size is not None:
            size = PLAIN  # no drafter, or none that is open
        # A text's first round may have waited for its drafter's prompt.
        settled = self._rounds > 1 and self._began_ns >= everyone.trials.settled_ns
        alike = settled and among_its_kind
        if size is None:
            return
        told = self._rounds % _TOLD_EVERY == 0 or everyone.texts == 1
        if self._beside is not None:
            told = self._trial is not None and self._trial.measures
        if alike and told:
            times = None if drafted is None else drafted.times
            home = self._trial is None
            everyone.times.add(everyone.load, size, wall, times, decided.times, home=home)
        everyone.passed(size, wall, self._tokens, self._beside, alike)
        if self._trial is None:
            everyone.consider(self._sizes, self._best)

    def end(self) -> None:
        """The text has ended, perhaps in the middle of a round."""
        self._leave()

    def _leave(self) -> bool:
        """Whether the round that was on was among its kind; False where none was."""
        drafting, self._drafting = self._drafting, None
        return drafting is not None and self._all.company.leave(drafting, self._began_ns)

    def _rank(self, load: int) -> None:
        """Find the best size; it is left only for one that is clearly better."""
        self._ranked = self._rounds, load
        if self._sizes[0] == PLAIN and not self._all.are_worth_it(self._sizes):
            self._best, self._expected = PLAIN, {}
            return
        chances = self._chances = self._acceptance.chances(self._deepest)
        self._expected = {size: self._all.expected(size, chances) for size in self._sizes}
        goodput = {size: of.goodput for size, of in self._expected.items() if of is not None}
        if not goodput:
            self._ranked = -_RANK_EVERY, load  # again, as soon as something is known
        else:
            best = max(goodput, key=goodput.__getitem__)
            if goodput[best] > _WORTH_IT * goodput[self._best]:
                self._best = best

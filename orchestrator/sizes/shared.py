"""What all texts of a pair learn together: what drafts bring, what rounds take, what to try."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from orchestrator.sizes.acceptance import AcceptanceEstimate, Chances
from orchestrator.sizes.goodput import PLAIN, WORTH_IT, expected_tokens
from orchestrator.sizes.round_times import RoundTimes
from orchestrator.sizes.trials import ROUNDS, RoundMix, Trial, Trials
from orchestrator.text.contracts import DraftSize, Expected

# Trials of drafts that are expected to be worse than this are a waste.
_HOPELESS = 0.85
# Rounds of each text in which a size was seen that was tried: of a trial some meet others.
_TRIED = ROUNDS / 2
# Ranking takes far longer than all else of a round here, and little changes from one to the next:
# what all texts share is looked through in rounds of each, of several at least.
_CONSIDER_EVERY, _SEVERAL = 4, 2
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
        mix: of rounds that are on.
        clock: in nanoseconds.

    Args:
        active: how many texts are being made.
        clock: in nanoseconds.
    """

    def __init__(
        self, active: Callable[[], int], clock: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self.acceptance = AcceptanceEstimate()
        self.times = RoundTimes()
        self.trials = Trials()
        self.clock = clock
        self.mix = RoundMix(clock)
        self._active = active
        self._passed = self._considered = 0  # rounds
        self._drafts: dict[int, tuple[bool, int]] = {}  # by load: found when so many had passed
        self._forecasts: dict[DraftSize, Forecast] = {}

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
        self,
        size: DraftSize,
        wall_ns: int,
        tokens: float,
        trial: Trial | None,
        alike: bool,
        rounds: int = 1,
    ) -> None:
        """A round has passed. A trial is charged with what it lost, and with what rounds lost that
        were on beside it.

        Args:
            size: of its draft.
            wall_ns: that it took.
            tokens: that it should yield.
            trial: that it was a part of, or beside.
            alike: whether it was beside rounds of its kind alone.
            rounds: that it stands for.
        """
        self._passed += rounds
        if trial is None:
            self.trials.earn(self.load, size, self.texts, rounds)
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
        after = drafted * (WORTH_IT if before else 1 / WORTH_IT) > plain
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
        if self.trials.running(load, texts, now) is not None:
            return
        chances = self.acceptance.chances(max(size.gamma for size in sizes))
        of_best = self.expected(best, chances)
        if of_best is None:
            return
        others = [(size, self.expected(size, chances)) for size in sizes if size != best]
        ranked = [(size, of) for size, of in others if of is not None]
        # What nothing may be slower than comes first, then what promises most.
        ranked.sort(key=lambda other: (other[0] != PLAIN, -other[1].goodput))
        drafted = any(self.times.seen(load, size) >= _TRIED for size in sizes if size != PLAIN)
        for size, expected in ranked:
            # What promises most is tried once at least: what is known of it may be of other loads.
            wanted = not drafted or expected.goodput > _HOPELESS * of_best.goodput
            seen = self.times.seen(load, size)
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

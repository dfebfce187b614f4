"""Sizes that follow what they earn: tokens over time at the present load, none among them."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.sizes.acceptance import AcceptanceEstimate
from orchestrator.sizes.goodput import PLAIN, WORTH_IT, expected_tokens
from orchestrator.sizes.shared import Adaptation
from orchestrator.sizes.trials import Trial
from orchestrator.text.contracts import Decided, Drafted, DraftSize, Expected, SizeChoice

# How a text begins where nothing is known.
_FIRST = 4
# Ranking takes far longer than all else of a round here, and little changes from one to the next.
# Of texts that are decoded plainly few other rounds are looked at: a plain round is short, and in a
# pass of many texts each waits for what the orchestrator does for the others.
_RANK_EVERY, _LOOK_EVERY = 8, 4
# Of several texts there are more rounds than a mean needs.
_TOLD_EVERY = 4


class AdaptiveSize:
    """Chooses a text's sizes.

    Args:
        adaptation: of all texts.
        sizes: to choose from.
    """

    def __init__(self, adaptation: Adaptation, sizes: Sequence[DraftSize]) -> None:
        self._all = adaptation
        self._sizes = list(sizes)
        self._deepest = max(size.gamma for size in sizes)
        self._acceptance = AcceptanceEstimate(adaptation.acceptance)
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
        self._wanted = False  # whether it is to have a draft
        self._drafting: bool | None = None  # whether it should get one; None where none is on
        self._has_drafter = self._drew = False  # as far as is known; in the last round
        self._ranked = -_RANK_EVERY, -1  # in which round, under which load
        self._rounds = 0
        # Plain rounds that repeat the last choice: how many are left, whether one is under way, and
        # how many have passed.
        self._same, self._unheard, self._passed = 0, False, 0
        self._untold = 0  # rounds
        self._choice = SizeChoice(PLAIN)

    @property
    def begins_drafting(self) -> bool:
        """Whether drafts are worth it as things stand."""
        self._rank(self._all.load)
        self._has_drafter = self._best != PLAIN
        return self._has_drafter

    def choose(self, left: int) -> SizeChoice:
        """The next draft's, with `left` >= 1 tokens still to emit."""
        everyone = self._all
        self._rounds += 1
        if self._same and everyone.trials.current is None:
            self._same -= 1
            self._unheard = True
            return self._choice
        self._same = 0
        self._leave()
        load, now = everyone.load, everyone.clock()
        if self._ranked[0] + _RANK_EVERY <= self._rounds or self._ranked[1] != load:
            self._rank(load)
        trial = self._beside = everyone.trials.running(load, everyone.texts, now)
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
        self._wanted = cut.gamma > 0
        self._drafting = self._wanted and self._has_drafter
        everyone.mix.enter(self._drafting)
        if cut not in self._expected:
            self._expected[cut] = everyone.expected(cut, self._chances)
        ahead = 1 if self._wanted and trial is not None else _RANK_EVERY
        self._choice = SizeChoice(cut, self._expected[cut], min(ahead, left))
        return self._choice

    def observe(self, drafted: Drafted | None, decided: Decided) -> None:
        """Learn from a round."""
        self._passed += 1
        if self._unheard:
            self._unheard = self._drew = False
            return
        everyone, size, rounds, tokens = self._all, self._size, self._passed, self._tokens
        self._passed = 0
        self._untold += rounds
        alike = self._is_alike(drafted)
        wall = everyone.clock() - self._began_ns
        if drafted is not None:
            self._acceptance.observe(drafted, decided)
            if drafted.asked not in (None, self._choice.size):
                return  # it was asked for before this size was chosen
            if size is not None:
                everyone.forecast(size).add(self._tokens, decided.num_accepted + 1)
        elif size is not None:
            size, tokens = PLAIN, 1.0  # no drafter, or none that is open
        if size is None:
            return
        if drafted is not None or not self._wanted:
            self._tell(size, wall, drafted, decided, alike)
        everyone.passed(size, wall, tokens, self._beside, alike, rounds)
        if self._trial is None:
            everyone.consider(self._sizes, self._best)
        if self._beside is None and self._best == PLAIN:
            self._go_on_plainly()

    def _is_alike(self, drafted: Drafted | None) -> bool:
        """Whether the round that was on tells what it takes."""
        drew, self._drew = self._drew, drafted is not None
        if self._wanted:
            self._has_drafter = self._drew
        # A drafter first reads what was emitted without it, the prompt at a text's beginning; and
        # while it is being opened others may have theirs: few drafts are soon made.
        follows = drew or not self._drew
        settled = self._rounds > 1 and self._began_ns >= self._all.trials.settled_ns
        return self._leave() and follows and settled

    def _tell(
        self, size: DraftSize, wall_ns: int, drafted: Drafted | None, decided: Decided, alike: bool
    ) -> None:
        """Have all texts know what a round took, or now and then one of several."""
        texts, rounds = self._all.texts, 1
        if self._beside is not None:
            told = self._trial is not None and self._trial.measures
        elif told := self._untold >= min(_TOLD_EVERY, texts):
            rounds, self._untold = self._untold, 0
        if alike and told:
            times = None if drafted is None else drafted.times
            home, weight = self._trial is None, min(rounds / texts, 1.0)
            self._all.times.add(
                self._all.load, size, wall_ns, times, decided.times, home=home, weight=weight
            )

    def _go_on_plainly(self) -> None:
        """Have some rounds be as the last one, unless a trial begins."""
        self._same = min(_RANK_EVERY, max(_LOOK_EVERY, self._all.texts)) - 1
        self._drafting = False
        self._all.mix.enter(False)

    def end(self) -> None:
        """The text has ended, perhaps in the middle of a round."""
        self._leave()

    def _leave(self) -> bool:
        """Whether the round that was on was among its kind; False where none was."""
        drafting, self._drafting = self._drafting, None
        return drafting is not None and self._all.mix.leave(drafting, self._began_ns)

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
            if goodput[best] > WORTH_IT * goodput[self._best]:
                self._best = best

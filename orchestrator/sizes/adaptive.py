"""Sizes by what they are expected to earn: tokens over time, plain decoding among them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from orchestrator.sizes.acceptance import AcceptanceEstimate, Chances
from orchestrator.sizes.goodput import PLAIN, WORTH_IT, expected_tokens
from orchestrator.sizes.round_times import SLOW, Mean, RoundTimes, load_of
from tandem.peers.text.contracts import DraftReply, RoundForecast, SizeChoice, VerdictReply
from tandem.profile import Profile
from tandem.speculation.tree import DraftSize

# Ranking takes far longer than the rest of a choice, and little changes from round to round. Of
# several texts, fewer rounds say as much.
_RANK_EVERY, _TELL_EVERY = 8, 4
# While nothing is drafted, one text at a time drafts for a few rounds, which shows whether the
# drafter is good again. Such samples may cost as large a share of the time.
_SAMPLE, _SHARE = 4, 0.01
# A kind's round time is learnt only while its texts outnumber the other kind's by this factor.
_MAJORITY = 4


class Adaptation:
    """What all texts of a pair learn together.

    Args:
        active: how many texts a target has.
        verify: the target's profile.
        draft: the drafter's.
        clock: in nanoseconds.

    Attributes:
        turns: from plain decoding to drafts, or back, of all texts together; and changes of what
            passes take.
    """

    def __init__(
        self,
        active: Callable[[], int],
        verify: Profile,
        draft: Profile,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.acceptance = AcceptanceEstimate()
        self.times = RoundTimes(verify, draft)
        self.clock = clock
        self._active = active
        # Tokens that drafts brought, and what chances said: some rules keep a tenth more than that.
        # A text's first drafts say nothing of it yet.
        self._kept, self._promised = (Mean(1.0, SLOW / 8, SLOW) for _ in range(2))
        self._best: dict[tuple[int, Sequence[DraftSize]], DraftSize] = {}  # by load
        self.turns = 0
        self._untold = 0  # rounds since all was ranked
        self._on = [0, 0]  # texts with plain and with drafted rounds
        self._most: bool | None = None  # whether most of them are drafted; since
        self._since_ns = 0
        self._saved = float(_RANK_EVERY)  # rounds of each text, for samples: one comes at once

    def renew_times(self, verify: Profile, draft: Profile) -> None:
        """Passes of new texts take another time from now on. What rounds took that are over or
        under way is forgotten; what is accepted stays known."""
        self.times = RoundTimes(verify, draft)
        self._best.clear()
        self._since_ns = self.clock()
        self.turns += 1  # open texts rank their sizes again

    @property
    def texts(self) -> int:
        """That a target has."""
        return max(self._active(), 1)

    def expected(self, size: DraftSize, chances: Chances) -> RoundForecast:
        """Of a round, where all texts have this size."""
        kept = (expected_tokens(size, chances) - 1) * self._kept.value / self._promised.value
        return RoundForecast(min(kept, size.gamma) + 1.0, self.times.wall(size, self.texts))

    def best_of(
        self, sizes: Sequence[DraftSize], chances: Chances, before: DraftSize | None
    ) -> DraftSize:
        """The size that earns most; the one of before, unless another earns clearly more."""
        goodput = {size: self.expected(size, chances).goodput for size in sizes}
        best = max(goodput, key=goodput.__getitem__)
        if before in goodput and goodput[best] <= WORTH_IT * goodput[before]:
            return before
        return best

    def best_of_all(self, sizes: tuple[DraftSize, ...], anew: bool = False) -> DraftSize:
        """The size that earns most where all texts have it. Drafts of a text that keeps many slow
        the others, so that no text decides for itself whether to draft."""
        key = load_of(self.texts), sizes
        before = self._best.get(key)
        if before is not None and not anew:
            return before
        chances = self.acceptance.chances(max(size.gamma for size in sizes))
        best = self._best[key] = self.best_of(sizes, chances, before)
        self.turns += before is not None and bool(before.gamma) != bool(best.gamma)
        return best

    def may_sample(self, size: DraftSize) -> bool:
        """Whether a text may draft for some rounds. It is taken to cost as if all texts did: others
        wait for its passes, and for its drafter, which reads the text first."""
        lost = max(self.times.wall(size, self.texts) / self.times.wall(PLAIN, self.texts) - 1, 0)
        if self._saved < 1 + _SAMPLE * lost:
            return False
        self._saved = 0.0
        self.acceptance.fade()
        return True

    def count(self, drafting: bool, texts: int) -> None:
        """Change the number of texts in plain or drafted rounds."""
        self._on[drafting] += texts
        plain, drafted = self._on
        mixed = _MAJORITY * min(self._on) > max(self._on)
        most = None if mixed else drafted > plain
        if most != self._most and plain + drafted:
            self._most, self._since_ns = most, self.clock()

    def learn(
        self,
        size: DraftSize,
        began_ns: int,
        drafted: DraftReply | None,
        decided: VerdictReply,
        sizes: tuple[DraftSize, ...],
        rounds: int,
    ) -> None:
        """Learn what a round took, where several took the time together."""
        texts = self.texts
        known = True
        if self._most == (size.gamma > 0) and began_ns >= self._since_ns:
            weight, wall = rounds / texts, self.clock() - began_ns
            known = self.times.add(size, texts, wall, drafted, decided, weight)
            if drafted is None:
                self._saved += _SHARE * weight
        self._untold += 1
        if known and texts > 1 and self._untold >= min(_RANK_EVERY, texts):
            self._untold = 0
            self.best_of_all(sizes, anew=True)

    def learn_kept(self, size: DraftSize, chances: Chances, kept: int) -> None:
        """Learn what a draft brought."""
        self._kept.add(kept)
        self._promised.add(expected_tokens(size, chances) - 1)


class AdaptiveSize:
    """Chooses a text's sizes.

    Args:
        everyone: what all texts learn.
        sizes: to choose from.
    """

    def __init__(self, everyone: Adaptation, sizes: Sequence[DraftSize]) -> None:
        self._all = everyone
        self._sizes = tuple(sizes)
        self._drafted = tuple(size for size in sizes if size.gamma)
        self._deepest = max(size.gamma for size in sizes)
        self._acceptance = AcceptanceEstimate(everyone.acceptance)
        self._chances = self._acceptance.chances(self._deepest)
        self._best = PLAIN
        self._untold = 0  # rounds
        self._left = 0.0  # rounds until sizes are ranked again
        self._rank()
        self._choice = self._chosen  # of the round that is on
        self._began_ns = 0
        self._drew: bool | None = None  # in the last round
        self._counted: bool | None = None  # among drafted rounds, or plain ones; None: not at all

    @property
    def begins_drafting(self) -> bool:
        """Whether drafts are worth it as things stand."""
        return self._best.gamma > 0

    def choose(self, left: int) -> SizeChoice:
        """The next draft's, with `left` >= 1 tokens still to emit."""
        if self._left <= 0 or self._turns != self._all.turns:
            self._rank()
        self._choice, size = self._chosen, self._best
        if left <= max(size.gamma, _RANK_EVERY):
            if size.gamma >= left:
                size = DraftSize(left - 1, size.nodes) if left > 1 else PLAIN
            expected = self._all.expected(size, self._chances)
            self._choice = SizeChoice(size, expected, min(_RANK_EVERY, left))
        self._count_as(size.gamma > 0 and self._drew is True)
        self._began_ns = self._all.clock()
        return self._choice

    def observe(self, drafted: DraftReply | None, decided: VerdictReply) -> None:
        """Learn from a round."""
        size, drew, before = self._choice.size, drafted is not None, self._drew
        self._drew = drew
        asked = size if drafted is None else drafted.asked or size  # perhaps some rounds ago
        # A text's first round of a kind may wait for a drafter that reads the text.
        # A drafter that is being opened is waited for, but not for ever.
        self._left -= 1 if drew == (size.gamma > 0) else 1 / _RANK_EVERY
        if drew == (size.gamma > 0):
            self._untold += 1
            if drew == before and asked == size and self._untold >= self._tell_every:
                rounds, self._untold = min(self._untold, self._tell_every), 0
                self._all.learn(size, self._began_ns, drafted, decided, self._sizes, rounds)
        if drafted is not None:
            # A head knows nothing of the places after plain rounds: its first draft is empty.
            if asked == size and (before or drafted.token_ids):
                self._all.learn_kept(size, self._chances, decided.num_accepted)
            self._acceptance.observe(drafted, decided)

    def end(self) -> None:
        """The text has ended, perhaps in the middle of a round."""
        self._count_as(None)

    def _count_as(self, drafting: bool | None) -> None:
        if drafting is self._counted:
            return
        if self._counted is not None:
            self._all.count(self._counted, -1)
        if drafting is not None:
            self._all.count(drafting, 1)
        self._counted = drafting

    def _rank(self) -> None:
        """Find the best size."""
        everyone, texts, best = self._all, self._all.texts, PLAIN
        if texts > 1:
            best = everyone.best_of_all(self._sizes)
        if best.gamma or texts == 1:
            self._chances = self._acceptance.chances(self._deepest)
            best = everyone.best_of(
                self._drafted if best.gamma else self._sizes, self._chances, self._best
            )
        turns = bool(best.gamma) != bool(self._best.gamma)
        self._left = _SAMPLE if turns else _RANK_EVERY
        if not best.gamma and self._deepest and everyone.may_sample(self._sizes[1]):
            self._acceptance.fade()
            self._chances = self._acceptance.chances(self._deepest)
            best, self._left = self._sizes[1], _SAMPLE
        self._best = best
        self._chosen = SizeChoice(best, everyone.expected(best, self._chances), _RANK_EVERY)
        self._turns, self._tell_every = everyone.turns, min(_TELL_EVERY, texts)

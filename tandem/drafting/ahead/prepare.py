"""Drafts after outcomes: chosen, drafted side by side, and taken or thrown away."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from tandem.drafting.ahead.forks import Copies, ForkedCache, PlacedFeed, adopted
from tandem.drafting.ahead.outcomes import RoundOutcome, likeliest_outcomes
from tandem.drafting.decoders.ranks import Ranks
from tandem.drafting.decoders.shape import ACCEPTANCE
from tandem.drafting.drafter import Drafter, DraftSequence, go_on
from tandem.engine.answers import ScoredRows
from tandem.engine.asks import (
    Ask,
    Draw,
    DrawTogether,
    ReadLogProbs,
    ReadTokens,
    Score,
    Steps,
    ToHost,
    ToHostTogether,
)
from tandem.engine.scorer import Scorer
from tandem.inference.feed import DrawnToken, Feed
from tandem.inference.kv.extents import Mark
from tandem.speculation.draft import Draft
from tandem.speculation.feedback import Feedback
from tandem.speculation.prepared_outcome import PreparedOutcome
from tandem.speculation.request.log_probs import LogProbsWanted, TokenLogProb
from tandem.speculation.tree import DraftSize

# Likely tokens that are looked at after each place: further ones come in one of fifty rounds.
_FOLLOWING = 4


@dataclass(frozen=True, slots=True)
class AheadDraft:
    """A draft, and what was prepared of it.

    Attributes:
        draft: that was asked for.
        outcome: None where nothing had been prepared.
        ready_ns: how long it had been ready when it was asked for; 0 where it was not.
        drafts: that had been prepared, finished or not.
    """

    draft: Draft
    outcome: PreparedOutcome | None = None
    ready_ns: int = 0
    drafts: int = 0


@dataclass(eq=False, slots=True)
class _Candidate:
    """A draft after an outcome, on its way.

    Attributes:
        outcome: of the verdict, that it is for.
        sequence: a fork, on which the draft is made.
        steps: that make it.
        ask: that is to be answered next; None before the first, and at the end.
        draft: once it is there.
        since_ns: when it was, of time.perf_counter_ns().
        begun: whether it has come to its first ask.
    """

    outcome: RoundOutcome
    sequence: DraftSequence
    steps: Steps[Draft]
    ask: Ask | None = None
    draft: Draft | None = None
    since_ns: int = 0
    begun: bool = False

    def go_on(self, answer: Any = None) -> None:
        """To the next ask, or to the end."""
        self.begun = True
        try:
            self.ask = self.steps.send(answer)
        except StopIteration as ended:
            self.ask, self.draft = None, ended.value
            self.since_ns = time.perf_counter_ns()


@dataclass(eq=False)
class Preparation:
    """What is prepared after one draft of a sequence. Engine thread only.

    What is prepared stands in branch rows of the sequence's caches, after all that it holds, and
    is forgotten unless its outcome comes. A prepared draft is what `drafter.go_on` would draft,
    with the numbers of its round.

    Args:
        drafter: makes the drafts.
        sequence: after its draft.
        round_: of the draft.
        draft: may be empty.
        size: of each draft that is prepared.
        most: of these.
        longest: that the sequence may grow to, in tokens.
        acceptance: by sibling rank.
    """

    drafter: Drafter
    sequence: DraftSequence
    round_: int
    draft: Draft
    size: DraftSize
    most: int
    longest: int
    acceptance: Sequence[float]
    _marks: list[Mark] = field(default_factory=list)
    _all: list[_Candidate] = field(default_factory=list)

    @property
    def drafts(self) -> int:
        """That are prepared, finished or not."""
        return len(self._all)

    @property
    def ready(self) -> list[tuple[Sequence[int], Draft]]:
        """Those that are finished, with the tokens of their outcomes, the likeliest first."""
        return [(one.outcome.token_ids, one.draft) for one in self._all if one.draft is not None]

    def steps(self) -> Steps[None]:
        """Prepare. It may be closed at any time: what there is by then can be used."""
        looks = self.drafter.traits.looks
        assert looks is not None
        forks = self._fork(looks)
        following = yield from self._look(looks, forks[0])
        outcomes = likeliest_outcomes(self.draft, following, self.acceptance, self.most)
        copied = Copies(self.sequence, self.sequence.caches)
        for outcome in outcomes:
            end = len(self.sequence.token_ids) + len(outcome.token_ids) + self.size.gamma
            if end <= self.longest:
                self._all.append(self._begin(copied, forks, outcome))
        yield from _run(self._all)

    def _fork(self, looks: Scorer) -> list[ForkedCache]:
        """Have what a draft left in the caches stand in branch rows; from the text's last token on,
        which is computed again beside them."""
        last = looks.vocab_size - 1  # see `ModelDrafter`
        tokens = [min(one, last) for one in (*self.sequence.token_ids, *self.draft.token_ids)]
        forks = []
        for cache in self.sequence.caches:
            self._marks.append(cache.mark())
            length = min(len(self.sequence.token_ids), cache.length) - 1
            forks.append(ForkedCache.of(cache, length, tokens[length : cache.length]))
        return forks

    def _look(
        self, scorer: Scorer, fork: ForkedCache
    ) -> Steps[Sequence[Sequence[tuple[int, float]]]]:
        """Likely tokens after each place of the draft, by one model."""
        before, places = len(fork.real.branches), len(self.draft) + 1
        parents = [0, *(before + 1 + place for place in self.draft.places())]
        tokens = [self.sequence.token_ids[-1], *self.draft.token_ids]
        known = [min(token, scorer.vocab_size - 1) for token in tokens]
        scored: ScoredRows = yield Score(scorer, Feed(fork.real, known, places, parents))
        sampling = self.sequence.sampling
        law = None if sampling.greedy else sampling
        told: list[TokenLogProb] = yield ReadLogProbs(
            scored, range(places), [0] * places, LogProbsWanted(_FOLLOWING), law
        )
        most = self.sequence.vocab_size  # of the target, whose tokens follow
        return [[each for each in one.top if each[0] < most] for one in told]

    def _begin(
        self, copied: Copies, forks: Sequence[ForkedCache], outcome: RoundOutcome
    ) -> _Candidate:
        own: DraftSequence = copied.copy([fork.twin() for fork in forks])
        steps = go_on(self.drafter, own, self.round_ + 1, outcome.token_ids, self.size)
        return _Candidate(outcome, own, steps)

    def resolve(
        self, round_: int, emitted: Sequence[int], size: DraftSize
    ) -> Steps[AheadDraft | None]:
        """The draft of the next round if its outcome is prepared, which depends on the outcome and
        the size alone; else None, and all is as if nothing had been prepared."""
        asked_ns, drafts = time.perf_counter_ns(), self.drafts
        found = next((one for one in self._all if one.outcome.token_ids == tuple(emitted)), None)
        if found is None or (round_, size) != (self.round_ + 1, self.size):
            self.forget()
            return None
        came = PreparedOutcome.LATE if found.draft is None else PreparedOutcome.HIT
        yield from _run([found])
        if found.draft is None:  # there was no room for it
            self.forget()
            return None
        adopted(self.sequence, found.sequence)
        self._marks = []
        return AheadDraft(found.draft, came, max(asked_ns - found.since_ns, 0), drafts)

    def forget(self) -> None:
        """Leave the sequence as it was."""
        for cache, mark in zip(self.sequence.caches, self._marks, strict=False):
            cache.return_to(mark)
        self._marks, self._all = [], []


def _run(all_: Sequence[_Candidate]) -> Steps[None]:
    """Drafts side by side, until all are there."""
    for one in all_:
        if not one.begun:
            one.go_on()
    while pending := [one for one in all_ if one.ask is not None]:
        if drawing := [one for one in pending if isinstance(one.ask, Draw)]:
            yield from _draw(drawing)
        elif reading := [one for one in pending if isinstance(one.ask, ReadTokens)]:
            yield from _read(reading)
        else:
            drafts = yield ToHostTogether([cast("ToHost", one.ask) for one in pending])
            for one, draft in zip(pending, drafts, strict=True):
                one.go_on(draft)


def _read(reading: Sequence[_Candidate]) -> Steps[None]:
    """Answer all that want to learn the same of what they drew as the first."""
    asks = [cast("ReadTokens", one.ask) for one in reading]
    shares = asks[0].shares
    chosen = [(one, ask) for one, ask in zip(reading, asks, strict=True) if ask.shares == shares]
    told = iter((yield ReadTokens([drawn for _, ask in chosen for drawn in ask.drawn], shares)))
    for one, ask in chosen:
        one.go_on([next(told) for _ in ask.drawn])


def _draw(drawing: Sequence[_Candidate]) -> Steps[None]:
    """Answer the draws of those that wait for the same model as the first."""
    asks = [cast("Draw", one.ask) for one in drawing]
    scorer = asks[0].scorer
    real = cast("ForkedCache", asks[0].feed.cache).real
    room = real.promised - real.used
    tokens: list[int | DrawnToken] = []
    parents: list[int] = []
    chosen: list[tuple[_Candidate, Draw, PlacedFeed]] = []
    for one, ask in zip(drawing, asks, strict=True):
        if ask.scorer is not scorer:
            continue
        if len(tokens) + len(ask.feed.token_ids) > room:
            one.ask = None
            continue
        fork = cast("ForkedCache", ask.feed.cache)
        placed = fork.placed(ask.feed, len(real.branches) + len(tokens))
        tokens += placed.token_ids
        parents += placed.parents
        chosen.append((one, ask, placed))
    if not chosen:
        return
    feed = Feed(real, tokens, len(tokens), parents)
    answers = yield DrawTogether(scorer, feed, [ask for _, ask, _ in chosen])
    for _, _, placed in chosen:
        placed.fed()
    for (one, _, _), answer in zip(chosen, answers, strict=True):
        one.go_on(answer)


def room_for(nodes: int, largest: int) -> int:
    """Positions of each cache that prepared drafts may take beside a sequence's own.

    Args:
        nodes: drafted tokens of all that is prepared.
        largest: draft of a sequence, in tokens: it is computed again, to see what may follow.
    """
    # No more outcomes are known. Each draft is fed after its outcome's tokens, which are hardly
    # more than it has itself.
    useful = min(nodes, _FOLLOWING * (largest + 1) * largest)
    return largest + 1 + 2 * useful if nodes else 0


class Ahead:
    """A sequence whose drafts may be prepared. Engine thread only.

    Args:
        drafter: of the sequence.
        sequence: whose drafts they are.
        longest: that the sequence may grow to, in tokens.
    """

    def __init__(self, drafter: Drafter, sequence: DraftSequence, longest: int) -> None:
        self._drafter, self._sequence = drafter, sequence
        self._longest = longest
        self._ranks = Ranks(ACCEPTANCE)
        self._prepared: Preparation | None = None

    def prepare(self, round_: int, draft: Draft, size: DraftSize, nodes: int) -> Steps[None]:
        """Prepare drafts of a size after the draft of a round; see `Preparation.steps`.

        Args:
            round_: of the draft.
            draft: that the target verifies.
            size: of each prepared draft.
            nodes: drafted tokens of all of them.
        """
        each = min(size.nodes or size.gamma, self._drafter.traits.largest_tree or size.gamma)
        if nodes < each:
            return
        self._prepared = Preparation(
            drafter=self._drafter,
            sequence=self._sequence,
            round_=round_,
            draft=draft,
            size=size,
            most=nodes // each,
            longest=self._longest,
            acceptance=self._ranks.acceptance,
        )
        yield from self._prepared.steps()

    @property
    def ready(self) -> list[tuple[Sequence[int], Draft]]:
        """Drafts of the next round, with the tokens of their outcomes; while nothing is prepared or
        drafted."""
        return [] if self._prepared is None else self._prepared.ready

    def go_on(
        self,
        round_: int,
        emitted: Sequence[int],
        size: DraftSize,
        feedback: Sequence[Feedback],
    ) -> Steps[AheadDraft]:
        """As `drafter.go_on`, by what is prepared where its outcome came. A drafter that prepares
        wants no feedback."""
        prepared, self._prepared = self._prepared, None
        drafts = 0
        if prepared is not None:
            self._ranks.see(prepared.draft, emitted[:-1])
            drafts = prepared.drafts
            made = yield from prepared.resolve(round_, emitted, size)
            if made is not None:
                return made
        draft = yield from go_on(self._drafter, self._sequence, round_, emitted, size, feedback)
        return AheadDraft(draft, PreparedOutcome.MISS if drafts else None, drafts=drafts)

"""Landed drafting methods, run against tables, every draw answered by each possible outcome.

What is enumerated is the generator that serves: its asks, its caches, its history. Only the
decoder and the random numbers are replaced, by tables of integer weights and by all outcomes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.drafting.drafter import Drafter, DraftSequence
from tandem.engine.asks import Ask, Draw, Host, Steps, Take, Tokens
from tandem.engine.draws import drafts_of, tokens_of
from tandem.inference.extents import SequenceCache
from tandem.inference.feed import Drawn, Draws, Feed, listed
from tandem.speculation.categorical import Categorical
from tandem.speculation.draft import Draft
from tandem.speculation.nodes import misfit
from tandem.speculation.proposal import Proposal
from tandem.speculation.sampling import Sampling
from target_svc.verifiers import Verifier
from tests.tree_laws import stops

VOCAB_SIZE = 3
# What is taken in, and a token that the target drew from its prefill.
PROMPT = (0, 1)
Text = tuple[int, ...]


class Memory:
    """A pool of one sequence, that holds its tokens where a real one holds keys and values."""

    def __init__(self, capacity: int) -> None:
        self.tokens = [-1] * capacity

    def move(self, places: Sequence[int], first: int) -> None:
        self.tokens[first : first + len(places)] = [self.tokens[place] for place in places]


def cache_of(capacity: int) -> SequenceCache:
    return SequenceCache(Memory(capacity), 0, capacity)  # type: ignore[arg-type]


class Table:
    """A scorer by heart: integer weights behind every text, `Tables` of one model."""

    vocab_size = VOCAB_SIZE

    def __init__(self, longest: int, seed: int, *, zeros: bool) -> None:
        random = np.random.default_rng(seed)
        self._rows: dict[Text, npt.NDArray[np.int64]] = {}
        for length in range(longest + 1):
            for text in product(range(VOCAB_SIZE), repeat=length):
                row = random.integers(1, 60, VOCAB_SIZE)
                if zeros:
                    kept = random.integers(VOCAB_SIZE)
                    row[(random.random(VOCAB_SIZE) < 0.35) & (np.arange(VOCAB_SIZE) != kept)] = 0
                self._rows[text] = row

    def row(self, text: Text) -> npt.NDArray[np.int64]:
        return self._rows[text]

    def forward(self, feeds: Sequence[Feed]) -> Tensor:
        raise AssertionError("its asks are answered one by one")


class Chooser:
    """The outcomes of one run, and what else might have come."""

    def __init__(self, chosen: Sequence[int]) -> None:
        self.chosen = list(chosen)
        self.others: list[list[int]] = []
        self.weight = 1.0
        self._next = 0

    def choose(self, weights: npt.NDArray[np.int64]) -> int:
        """A token of a row of integer weights, not all 0."""
        possible = np.flatnonzero(weights).tolist()
        if self._next == len(self.chosen):
            self.others += [[*self.chosen, token] for token in possible[1:]]
            self.chosen.append(possible[0])
        token = self.chosen[self._next]
        self._next += 1
        self.weight *= float(weights[token]) / float(weights.sum())
        return token


class Answering:
    """Answers the asks of one run.

    Args:
        chooser: chooses what is drawn.
        text: that every cache has to hold; None while a prompt is taken in.
    """

    def __init__(self, chooser: Chooser, text: Text | None) -> None:
        self._chooser = chooser
        self._text = text

    def run(self, steps: Steps[Any]) -> Any:
        answer: Any = None
        while True:
            try:
                ask = steps.send(answer)
            except StopIteration as ended:
                return ended.value
            answer = self._answer(ask)

    def _answer(self, ask: Ask) -> Any:
        if isinstance(ask, Take):
            self._feed(ask.feed)
            return None
        if isinstance(ask, Draw):
            return self._draw(ask)
        if isinstance(ask, Tokens):
            return tokens_of([ask])[0]
        assert isinstance(ask, Host)
        return drafts_of([ask])[0]

    def _feed(self, feed: Feed) -> list[Text]:
        """Let a cache grow; the texts that its new rows see, each with itself."""
        cache, parents = feed.cache, list(feed.parents or ())
        memory: list[int] = cache.pool.tokens  # type: ignore[attr-defined]
        ids = [
            int(one.draws.tokens[one.index]) if isinstance(one, Drawn) else one
            for one in listed(feed.token_ids)
        ]
        news = len(ids) - len(parents)
        old = 0 if news else len(cache.branches)
        start = cache.length + old
        memory[start : start + len(ids)] = ids
        length = cache.length
        cache.grow(ids, feed.parents)
        trunk = tuple(memory[: cache.length])
        if self._text is not None:
            # A chain is drafted in the trunk itself.
            assert trunk[: len(self._text)] == self._text, "the cache holds another text"
        seen = [trunk[: length + i + 1] for i in range(news)]
        for row in range(old + 1, old + len(parents) + 1):
            path = []
            while row:
                path.append(memory[cache.length + row - 1])
                row = cache.branches.parents[row - 1]
            seen.append((*trunk, *reversed(path)))
        return seen

    def _draw(self, ask: Draw) -> list[Drawn]:
        scorer = ask.scorer
        assert isinstance(scorer, Table)
        assert not ask.sampling.greedy
        texts = self._feed(ask.feed)[-ask.feed.rows :]
        assert len(texts) == len(ask.counts)
        rows = np.stack([scorer.row(text[len(PROMPT) :]) for text in texts])
        siblings = max(ask.counts)
        tokens = np.zeros((len(rows), siblings), np.int64)
        for i, (row, count) in enumerate(zip(rows, ask.counts, strict=True)):
            earlier = [int(one.draws.tokens[one.index]) for one in ask.earlier] if i == 0 else []
            left = row.copy()
            left[earlier] = 0
            for rank in range(count):
                taken = [*earlier, *tokens[i, :rank].tolist()]
                # Of a row of which nothing is left, a token that was taken.
                tokens[i, rank] = self._chooser.choose(left) if left.any() else taken[0]
                if ask.distinct:
                    left[tokens[i, rank]] = 0
        ids = torch.arange(VOCAB_SIZE).expand(len(rows), -1)
        drawn = Draws(
            torch.from_numpy(tokens.flatten()), Categorical(ids, torch.from_numpy(rows)), siblings
        )
        return [
            Drawn(drawn, i * siblings + rank)
            for i, count in enumerate(ask.counts)
            for rank in range(count)
        ]


def runs(run: Callable[[Chooser], Any]) -> Iterator[tuple[Any, float]]:
    """Every result of something that draws, with its chance."""
    pending: list[list[int]] = [[]]
    while pending:
        chooser = Chooser(pending.pop())
        result = run(chooser)
        pending += chooser.others
        yield result, chooser.weight


def key_of(sequence: DraftSequence) -> Any:
    """All that a sequence's later drafts may depend on: two of one key are one."""
    state = sequence.state
    if isinstance(state, list) and state and isinstance(state[0], DraftSequence):
        state = tuple(key_of(part) for part in state)
    else:
        state = repr(state)
    caches = tuple(
        (cache.length, tuple(cache.pool.tokens[: cache.length]), cache.branches)
        for cache in sequence.caches
    )
    return tuple(sequence.token_ids), state, caches


@dataclass(eq=False)
class Outcomes:
    """Every draft behind a state of a sequence.

    Attributes:
        drafts: that may come out.
        weights: the chance of each.
        after: the sequence behind each.
        observed: the same when it was told what came out, by draft and tokens.
    """

    drafts: list[Draft] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    after: list[DraftSequence] = field(default_factory=list)
    observed: dict[tuple[int, Text], tuple[Any, DraftSequence]] = field(default_factory=dict)


class Enumeration:
    """Whole decodings of one method.

    Args:
        drafter: the landed generator.
        scorers: how many it has.
        target: p behind every text, floats.
        length: tokens of a text.
        gamma: most that a draft is deep; less where the text ends.
        nodes: most that it holds.
    """

    def __init__(
        self, drafter: Drafter, scorers: int, target: Table, length: int, gamma: int, nodes: int
    ) -> None:
        self.drafter, self._scorers, self._target = drafter, scorers, target
        self._length, self._gamma, self._nodes = length, gamma, nodes
        self._outcomes: dict[Any, Outcomes] = {}
        self.deepest = 0

    @cached_property
    def _start(self) -> DraftSequence:
        sequence = DraftSequence(list(PROMPT[:-1]), Sampling(), VOCAB_SIZE, self._nodes)
        capacity = len(PROMPT) + self._length + self._gamma + self._nodes
        sequence.caches = [cache_of(capacity) for _ in range(self._scorers)]
        Answering(Chooser(()), None).run(self.drafter.open(sequence))
        self.drafter.observe(sequence, PROMPT[-1:])
        return sequence

    @property
    def outcomes(self) -> list[Outcomes]:
        """Behind every state so far."""
        return list(self._outcomes.values())

    def expected(self) -> dict[Text, float]:
        """The law of texts under p alone."""
        law: dict[Text, float] = {}
        for text in product(range(VOCAB_SIZE), repeat=self._length):
            chance = 1.0
            for i, token in enumerate(text):
                chance *= float(self._p(text[:i])[token])
            law[text] = chance
        return law

    def _p(self, text: Text) -> npt.NDArray[np.float64]:
        row = self._target.row(text).astype(np.float64)
        law: npt.NDArray[np.float64] = row / row.sum()
        return law

    def law(self, rule: Verifier[Any]) -> dict[Text, float]:
        """The law of texts that the method drafts for and the rule decides, by all rounds."""
        law: dict[Text, float] = {}
        pending: list[dict[Any, tuple[DraftSequence, float]]] = [{} for _ in range(self._length)]
        pending[0][key_of(self._start)] = self._start, 1.0
        for emitted in range(self._length):
            for key, (sequence, mass) in pending[emitted].items():
                outcomes = self._drafted(key, sequence, self._length - emitted)
                for draft, news, chance in self._decided(rule, outcomes, sequence):
                    if not chance:
                        continue
                    text = (*sequence.token_ids[len(PROMPT) :], *news)[: self._length]
                    if len(text) == self._length:
                        law[text] = law.get(text, 0.0) + mass * chance
                        continue
                    own, after = self._observed(outcomes, draft, news)
                    before = pending[len(text)].get(own, (after, 0.0))
                    pending[len(text)][own] = before[0], before[1] + mass * chance
        return law

    def _observed(
        self, outcomes: Outcomes, draft: int, news: list[int]
    ) -> tuple[Any, DraftSequence]:
        """The state behind a draft of which so much came out, with its key; whatever the rule."""
        key = draft, tuple(news)
        if key not in outcomes.observed:
            after = copy.deepcopy(outcomes.after[draft])
            self.drafter.observe(after, news)
            outcomes.observed[key] = key_of(after), after
        return outcomes.observed[key]

    def _drafted(self, key: Any, sequence: DraftSequence, left: int) -> Outcomes:
        if key in self._outcomes:
            return self._outcomes[key]
        found = self._outcomes[key] = Outcomes()
        text, gamma = tuple(sequence.token_ids), min(self._gamma, left)

        def run(chooser: Chooser) -> tuple[Draft, DraftSequence]:
            own = copy.deepcopy(sequence)
            steps = self.drafter.draft(own, 1, gamma, self._nodes)
            return Answering(chooser, text).run(steps), own

        for (draft, after), weight in runs(run):
            assert draft.depth <= gamma
            assert len(draft) <= self._nodes
            draft.check_shape(VOCAB_SIZE)
            self.deepest = max(self.deepest, draft.depth)
            found.drafts.append(draft)
            found.weights.append(weight)
            found.after.append(after)
        assert abs(sum(found.weights) - 1) < 1e-12
        return found

    def _decided(
        self, rule: Verifier[Any], outcomes: Outcomes, sequence: DraftSequence
    ) -> Iterator[tuple[int, list[int], float]]:
        """Of each draft what may be emitted, with its chance: (draft, tokens, chance)."""
        text = tuple(sequence.token_ids[len(PROMPT) :])
        drafts = outcomes.drafts
        assert {misfit(draft, rule.takes) for draft in drafts} == {""}, "the target would refuse it"
        paths = [[self._path(draft, place) for place in range(len(draft) + 1)] for draft in drafts]
        most = max(len(draft) for draft in drafts)
        p = torch.zeros(len(drafts), most + 1, VOCAB_SIZE, dtype=torch.float64)
        for b, own in enumerate(paths):
            for place, path in enumerate(own):
                p[b, place] = torch.from_numpy(self._p((*text, *path)))
        proposal = Proposal.from_drafts(drafts)
        judged = rule.judged(proposal, p)
        chances = stops(rule, proposal, judged.accept())
        for place in range(most + 1):
            at = torch.full_like(proposal.lengths, place)
            weights = judged.residual(at)
            residual = (weights / weights.sum(-1, keepdim=True)).tolist()
            for b, chance in enumerate(chances[:, place].tolist()):
                if chance <= 0:
                    continue
                for token in range(VOCAB_SIZE):
                    weight = outcomes.weights[b] * chance * residual[b][token]
                    yield b, [*paths[b][place], token], weight

    @staticmethod
    def _path(draft: Draft, place: int) -> list[int]:
        return [draft.token_ids[step - 1] for step in draft.path_to(place)]

    def error(self, rule: Verifier[Any]) -> float:
        """The greatest of a text's chance."""
        law, expected = self.law(rule), self.expected()
        return max(abs(law.get(text, 0.0) - chance) for text, chance in expected.items())

"""Tables of weights instead of a decoder, and every outcome instead of random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.drafting.drafter import Recipe
from tandem.engine.answers import ReviewAnswer, ScoredRows
from tandem.engine.asks import (
    Ask,
    Draw,
    DrawFrom,
    DrawTogether,
    ReadLogProbs,
    ReadTokens,
    Review,
    Score,
    Steps,
    Take,
    ToHost,
    ToHostTogether,
)
from tandem.engine.numbers.home import drafts_of, tokens_of
from tandem.engine.numbers.log_probs import log_probs_of
from tandem.inference.feed import DrawnToken, Draws, Feed, listed
from tandem.inference.kv.extents import SequenceCache
from tandem.inference.output import PassOutput
from tandem.speculation.categorical import Categorical
from tandem.speculation.draft import Draft
from tandem.speculation.feedback import Feedback, FeedbackWanted, Row
from tests.support.laws.shaping import said_of, shaped_weights
from tests.support.laws.trees.laws import reviewed, told_of

VOCAB_SIZE = 3
# A prompt, and a token that the target drew from its prefill.
PROMPT = (0, 1)
Text = tuple[int, ...]
_ALL_IDS = torch.arange(VOCAB_SIZE)


class Memory:
    """A pool of one sequence, which holds its tokens instead of keys and values."""

    def __init__(self, capacity: int) -> None:
        self.tokens = [-1] * capacity

    def move(self, places: Sequence[int], to: Sequence[int]) -> None:
        self.tokens[to[0] : to[0] + len(places)] = [self.tokens[place] for place in places]


def scorers_of(
    recipe: Recipe, longest: int, seed: int, *, zeros: bool, depths: tuple[tuple[float, ...], ...]
) -> list[Table]:
    """Tables for a recipe's checkpoints, decoders and heads.

    Args:
        recipe: see there.
        longest: text.
        seed: of the first one.
        zeros: whether weights may be 0.
        depths: acceptance of a head's siblings, by depth.
    """
    return [
        HeadTable(
            longest,
            seed + i,
            zeros=zeros,
            acceptance=depths,
            by_depth=checkpoint.head == "medusa",
        )
        if checkpoint.head
        else Table(longest, seed + i, zeros=zeros)
        for i, checkpoint in enumerate(recipe.checkpoints)
    ]


def held_by(cache: SequenceCache) -> Text:
    """The tokens of its trunk."""
    tokens: list[int] = cache.pool.tokens  # type: ignore[attr-defined]
    return tuple(tokens[slot] for slot in cache.slots(0, cache.length))


def cache_of(capacity: int) -> SequenceCache:
    return SequenceCache(Memory(capacity), 0, capacity)  # type: ignore[arg-type]


@lru_cache(maxsize=64)
def _rows_of(longest: int, seed: int, zeros: bool) -> dict[Text, npt.NDArray[np.int64]]:
    """A table's rows, which nobody changes."""
    random = np.random.default_rng(seed)
    rows: dict[Text, npt.NDArray[np.int64]] = {}
    for length in range(longest + 1):
        for text in product(range(VOCAB_SIZE), repeat=length):
            row = rows[text] = random.integers(1, 60, VOCAB_SIZE)
            if zeros:
                kept = random.integers(VOCAB_SIZE)
                row[(random.random(VOCAB_SIZE) < 0.35) & (np.arange(VOCAB_SIZE) != kept)] = 0
            row.flags.writeable = False
    return rows


class Table:
    """A scorer that is a table: integer weights after every text."""

    vocab_size = VOCAB_SIZE
    chains = False

    def __init__(self, longest: int, seed: int, *, zeros: bool) -> None:
        self._rows = _rows_of(longest, seed, zeros)

    def row(self, text: Text) -> npt.NDArray[np.int64]:
        return self._rows[text]

    def forward(self, feeds: Sequence[Feed]) -> PassOutput:
        raise AssertionError("its asks are answered one by one")

    def draw_on(self, feeds: Sequence[Feed], asked: npt.NDArray[np.float64]) -> Tensor | None:
        raise AssertionError("its asks are answered one by one")


# Of the longest text that a feature can tell.
FEATURE_WIDTH = 24


def feature_of(token_ids: Sequence[int], first: int) -> Feedback:
    """Features that are the text so far: of its positions from `first` on, but for the last."""
    states = np.full((len(token_ids) - 1 - first, 1, FEATURE_WIDTH), -1, np.int16)
    for i, state in enumerate(states[:, 0]):
        state[: first + i + 1] = token_ids[: first + i + 1]
    return Feedback(0, range(first, first + len(states)), states)


def text_of(state: npt.NDArray[np.int16]) -> Text:
    """The text that a feature tells."""
    return tuple(token for token in state[0].tolist() if token >= 0)


class HeadTable(Table):
    """A head that is a table.

    Attributes:
        by_depth: weights by the text of the newest feature and by the row's number, as Medusa's;
            else by the text of features and tokens, as EAGLE's.
    """

    reads = (1,)
    hidden_size = FEATURE_WIDTH
    made_for = ""
    remembers = True
    depths = 3

    def __init__(
        self,
        longest: int,
        seed: int,
        *,
        zeros: bool,
        acceptance: Any = (),
        by_depth: bool = True,
    ) -> None:
        super().__init__(0 if by_depth else longest, seed, zeros=zeros)
        self._seed, self._zeros, self.acceptance = seed, zeros, acceptance
        self.by_depth = by_depth

    def of_depth(self, text: Text, depth: int) -> npt.NDArray[np.int64]:
        """The row of a depth after the text of a feature."""
        random = np.random.default_rng((self._seed, depth, *text))
        row = random.integers(1, 60, VOCAB_SIZE)
        if self._zeros:
            row[random.integers(VOCAB_SIZE)] = 0
        return row


class Flat(Table):
    """The same weight for every token after every text of any length."""

    def __init__(self) -> None:
        super().__init__(0, 0, zeros=False)

    def row(self, text: Text) -> npt.NDArray[np.int64]:
        return np.ones(VOCAB_SIZE, np.int64)


class Chooser:
    """The outcomes of one run, and the alternatives to explore."""

    def __init__(self, chosen: Sequence[int]) -> None:
        self.chosen = list(chosen)
        self.others: list[list[int]] = []
        self.weight = 1.0
        self._next = 0

    def choose(self, weights: Sequence[float]) -> int:
        """A token of a row of weights, not all 0."""
        if self._next == len(self.chosen):
            possible = [token for token, weight in enumerate(weights) if weight]
            self.others += [[*self.chosen, token] for token in possible[1:]]
            self.chosen.append(possible[0])
        token = self.chosen[self._next]
        self._next += 1
        self.weight *= weights[token] / sum(weights)
        return token


class Answering:
    """Answers the asks of one run.

    Attributes:
        text: that every cache must hold; None during a prefill.
        explores: of prepared drafts, by the text that a draw is after: whether all outcomes are of
            interest; else one will do.

    Args:
        chooser: chooses the outcomes of draws.
        text: see above.
        found: numbers that were found before, by all that they follow from.
    """

    def __init__(
        self, chooser: Chooser, text: Text | None, found: dict[Any, Any] | None = None
    ) -> None:
        self._chooser = chooser
        self._found = {} if found is None else found
        self.text = text
        self._told: Text = ()  # by features, with the token after the last one
        self.explores: Callable[[Text], bool] = lambda text: True

    def run(self, steps: Steps[Any], passes: int = 1 << 30) -> Any:
        """The result of steps; None where they are ended before so many passes are done."""
        answer: Any = None
        while passes:
            try:
                ask = steps.send(answer)
            except StopIteration as ended:
                return ended.value
            answer = self._answer(ask)
            passes -= isinstance(ask, (Score, Draw, DrawTogether, Review))
        steps.close()
        return None

    def _answer(self, ask: Ask) -> Any:
        if isinstance(ask, Take):
            self._feed(ask.feed)
            return None
        if isinstance(ask, Draw):
            return self._draw_chain(ask)
        if isinstance(ask, DrawFrom):
            return self._draw_from(ask)
        if isinstance(ask, DrawTogether):
            return self._draw_together(ask)
        if isinstance(ask, Score):
            assert isinstance(ask.scorer, Table)
            rows = np.stack([ask.scorer.row(seen[len(PROMPT) :]) for seen in self._feed(ask.feed)])
            logits = torch.from_numpy(rows[-ask.feed.rows :]).double().log()
            return ScoredRows(logits, 0, ask.feed.rows)
        if isinstance(ask, Review):
            return self._review(ask)
        if isinstance(ask, ReadLogProbs):
            return log_probs_of([ask])[0]
        if isinstance(ask, ReadTokens):
            return tokens_of([ask])[0]
        if isinstance(ask, ToHostTogether):
            return drafts_of(ask.hosts)
        assert isinstance(ask, ToHost)
        return drafts_of([ask])[0]

    def _review(self, ask: Review) -> ReviewAnswer:
        """Every place where a guess may end, and every token that may follow, with their exact
        chances."""
        assert isinstance(ask.scorer, Table)
        seen = self._feed(ask.feed)[-ask.feed.rows :]
        rows = [ask.scorer.row(text[len(PROMPT) :]) for text in seen]
        p = np.stack([row / row.sum() for row in rows])
        while len(p) <= len(ask.guess):  # nothing follows what fills a draft
            p = np.concatenate([p, p[-1:]])
        key = ask.rule, ask.leniency, told_of(ask.guess), p.tobytes()
        if key not in self._found:
            self._found[key] = reviewed(ask, p)
        chances, residuals = self._found[key]
        place = self._chooser.choose(chances)
        tokens = ask.guess.token_ids[:place]
        if place < ask.feed.rows:
            tokens = [*tokens, self._chooser.choose(residuals[place])]
        sent = [(np.flatnonzero(row), row[row > 0]) for row in rows[: len(tokens)]]
        told = [(ids.astype(np.uint32), weights.astype(np.uint16)) for ids, weights in sent]
        return ReviewAnswer(place, tokens, told)

    def _feed(self, feed: Feed) -> list[Text]:
        """Grow a cache; returns the texts that its new rows see, each including its own token."""
        cache, parents = feed.cache, list(feed.parents or ())
        memory: list[int] = cache.pool.tokens  # type: ignore[attr-defined]
        ids = [
            int(one.draws.tokens[one.index]) if isinstance(one, DrawnToken) else one
            for one in listed(feed.token_ids)
        ]
        news = len(ids) - len(parents)
        old = 0 if news else len(cache.branches)
        for slot, token in zip(cache.slots(cache.length + old, len(ids)), ids, strict=True):
            memory[slot] = token
        length = cache.length
        cache.grow(ids, feed.parents)
        trunk = held_by(cache)
        if self.text is not None and feed.features is None and not self._told:
            # A chain is drafted in the trunk itself.
            assert trunk[: len(self.text)] == self.text, "the cache holds another text"
        seen = [trunk[: length + i + 1] for i in range(news)]
        for row in range(old + 1, old + len(parents) + 1):
            path = []
            while row:
                path.append(memory[cache.slots(cache.length + row - 1, 1)[0]])
                row = cache.branches.parents[row - 1]
            seen.append((*trunk, *reversed(path)))
        return seen

    def _draw_together(self, ask: DrawTogether) -> list[list[DrawnToken]]:
        """Of prepared drafts, whose caches are branches of the one that is fed."""
        scorer = ask.scorer
        assert isinstance(scorer, Table)
        seen = self._feed(ask.feed)
        laws = [scorer.row(text[len(PROMPT) :]) for text in seen]
        found = []
        for one, first in zip(ask.draws, ask.firsts(0), strict=True):
            chooser = self._chooser
            if not self.explores(seen[first]):
                self._chooser = Chooser(())
            found.append(self._draw(one, laws[first : first + one.feed.rows]))
            self._chooser = chooser
        return found

    def _draw_from(self, ask: DrawFrom) -> Draft:
        """A token from each row, by its weights as they are."""
        tokens = []
        for row in ask.rows:
            weights = np.zeros(VOCAB_SIZE, np.int64)
            weights[row.ids] = row.weights
            tokens.append(self._chooser.choose(weights.tolist()))
        return Draft(
            tokens,
            [len(row.ids) for row in ask.rows],
            np.concatenate([row.ids for row in ask.rows]),
            np.concatenate([row.weights for row in ask.rows]),
        )

    def _draw_chain(self, ask: Draw) -> list[DrawnToken]:
        """What is asked for, and of what follows some: drafts go on after one answer or two."""
        drawn = self._draw(ask, self._laws(ask))
        if ask.follow:
            again = replace(ask, feed=Feed(ask.feed.cache, drawn[-1], 1), node=ask.node + 1)
            drawn += self._draw(again, self._laws(again))
        return drawn

    def _draw(self, ask: Draw, laws: Sequence[npt.NDArray[np.int64]]) -> list[DrawnToken]:
        groups = range(len(laws)) if ask.rows is None else ask.rows
        assert len(groups) == len(ask.counts)
        rows = np.stack([laws[row] for row in groups])
        if ask.shaped is not None:
            key = rows.tobytes(), rows.shape, said_of(ask.shaped)
            if key not in self._found:
                self._found[key] = shaped_weights(rows, ask.shaped)
            rows = self._found[key]
        siblings = max(ask.counts)
        if ask.sampling.greedy:  # the likeliest tokens are sent as certain ones
            order = np.argsort(-rows, 1, kind="stable")[:, :siblings]
            likeliest = np.pad(order, ((0, 0), (0, siblings - order.shape[1])))
            certain = Categorical(torch.from_numpy(order[:, :1]), torch.ones(len(rows), 1).long())
            drawn = Draws(torch.from_numpy(likeliest.flatten()), certain, siblings, certain=True)
            return self._handed_out(ask, drawn, groups)
        tokens = np.zeros((len(rows), siblings), np.int64)
        for i, (row, count) in enumerate(zip(rows, ask.counts, strict=True)):
            earlier = [int(one.draws.tokens[one.index]) for one in ask.earlier] if i == 0 else []
            left = [0 if token in earlier else w for token, w in enumerate(row.tolist())]
            taken = earlier
            for rank in range(count):
                # If nothing is left of a row, a token that was already taken.
                token = self._chooser.choose(left) if any(left) else taken[0]
                tokens[i, rank] = token
                taken = [*taken, token]
                if ask.distinct:
                    left[token] = 0
        ids = _ALL_IDS.expand(len(rows), -1)
        drawn = Draws(
            torch.from_numpy(tokens.flatten()), Categorical(ids, torch.from_numpy(rows)), siblings
        )
        return self._handed_out(ask, drawn, groups)

    def _laws(self, ask: Draw) -> list[npt.NDArray[np.int64]]:
        """The rows of an ask's feed."""
        scorer, feed = ask.scorer, ask.feed
        assert isinstance(scorer, Table)
        if not isinstance(scorer, HeadTable):
            return [scorer.row(text[len(PROMPT) :]) for text in self._feed(feed)[-feed.rows :]]
        if feed.features is None:  # after guesses
            return [
                scorer.row((*self._told[len(PROMPT) :], *seen[feed.cache.length :]))
                for seen in self._feed(feed)[-feed.rows :]
            ]
        states = np.concatenate([np.asarray(part) for part in feed.features])
        told = [text_of(state) for state in states]
        self._told = (*told[-1], *listed(feed.token_ids)[-1:])  # type: ignore[arg-type]
        assert self.text in (None, self._told), "the feature is of another text"
        behind = [text[len(told[0]) :] for text in (*told[1:], self._told)]
        assert [text[-1] for text in behind] == list(listed(feed.token_ids)), "pairs are one off"
        self._feed(feed)
        if scorer.by_depth:
            return [scorer.of_depth(told[-1], depth) for depth in range(feed.rows)]
        return [scorer.row(self._told[len(PROMPT) :])]

    @staticmethod
    def _handed_out(ask: Draw, drawn: Draws, groups: Sequence[int]) -> list[DrawnToken]:
        siblings = drawn.siblings
        if ask.rows is not None:
            drawn.same = [list(groups).index(row) for row in groups]
        return [
            DrawnToken(drawn, i * siblings + rank)
            for i, count in enumerate(ask.counts)
            for rank in range(count)
        ]


def runs(run: Callable[[Chooser], Any]) -> Iterator[tuple[Any, float]]:
    """Every result of a function that draws, with its probability."""
    pending: list[list[int]] = [[]]
    while pending:
        chooser = Chooser(pending.pop())
        result = run(chooser)
        pending += chooser.others
        yield result, chooser.weight


# Integer weights of every token after tokens; ids beyond the vocabulary are extra embeddings.
Rows = Callable[[tuple[int, ...]], npt.NDArray[np.int64]]


def predictions_of(
    wanted: FeedbackWanted, draft: Draft, place: int, text: Sequence[int], row: Rows
) -> dict[int, Row]:
    """What the target tells of a round.

    Args:
        wanted: by the drafter.
        draft: with its probes.
        place: where the round ended.
        text: before the round.
        row: of the target, after any tokens.
    """
    count, probes = len(draft), draft.probes
    paths = [
        (*text, *(draft.token_ids[at - 1] for at in draft.path_to(home)))
        for home in range(count + 1)
    ]
    for token_id, parent in zip(probes.token_ids, probes.parents, strict=True):
        paths.append((*paths[parent], token_id))
    if wanted.everywhere:
        twins = [node for node, home in enumerate(draft.homes(), 1) if home != node]
        places = [at for at in range(len(paths)) if at not in twins]
    else:
        places = [0, *draft.path_to(place), *probes.behind(place, count)]
    found = {}
    for at in places:
        own = row(paths[at])
        order = np.argsort(-own, kind="stable")[: wanted.top]
        order = order[own[order] > 0]
        weights = np.ones(1) if wanted.top == 1 else own[order]
        found[at] = Row(order.astype(np.uint32), weights.astype(np.uint16))
    return found


def extended(
    seed: int, vocab_size: int, known: Callable[[tuple[int, ...]], npt.NDArray[np.int64] | None]
) -> Rows:
    """A target's rows after any tokens: its own where it has them, else some that hang on all
    tokens before.

    Args:
        seed: of those.
        vocab_size: see there.
        known: the target's own; None where it has none.
    """

    def row(text: tuple[int, ...]) -> npt.NDArray[np.int64]:
        own = known(text)
        if own is not None:
            return own
        random = np.random.default_rng((seed, *text))
        weights = random.integers(1, 60, vocab_size)
        weights[random.integers(vocab_size)] = 0
        return weights

    return row

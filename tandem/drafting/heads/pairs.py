"""Trees by a head that reads pairs of a feature and the token behind it, level by level."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, cast

from pydantic import Field

from tandem.drafting.drafter import Drafter, DraftSequence, Setting
from tandem.drafting.features import FeatureSpec
from tandem.drafting.heads.head import AcceptanceByDepth, OfHead, deepened, shape_of
from tandem.engine.asks import Draw, DrawnTree, ReadTokens, Steps, ToHost, Truncation
from tandem.engine.scorer import HeadScorer, Scorer
from tandem.inference.feed import Drawn, Feed
from tandem.speculation.draft import Draft
from tandem.speculation.nodes import DraftShape

# Of a prompt: a message of 4 MiB holds as many of 4,096 numbers in three layers.
PROMPT_TOKENS = 128
_MOST_PROMPT = 4096


@dataclass(eq=False)
class _Held:
    """What a sequence's cache holds: pairs of a feature and the token behind it.

    Attributes:
        begins: position of the first feature.
        end: position behind the last one.
    """

    begins: int = -1
    end: int = -1


@dataclass(eq=False)
class _Grown:
    """What a round has drawn so far; the tokens are on the device.

    Attributes:
        drawn: in order. Place 0 is the root, place i + 1 is behind draw i.
        places: that they hang at.
        rows: branch row of each place that was computed; the root is 0.
    """

    drawn: list[Drawn]
    places: list[int]
    rows: dict[int, int]


class PairsDrafter(Drafter):
    """Draws siblings without replacement behind each place that it computes.

    The head reads pairs: the feature of position i with the token i + 1. True pairs are fed as soon
    as their features came; behind them it goes on with drawn tokens, whose places leave its cache
    at the next draft. It knows nothing before the newest unbroken run of features.

    Args:
        head: guesses features, and tokens from them.
        truncation: of its rows.
        acceptance: by depth and sibling rank; deeper levels are like the last one.
        largest_tree: most tokens of a draft.
        prompt_tokens: whose features are wanted of a prompt.
        certain: whether the likeliest tokens are sent as certain ones, and none is drawn.
        confident: whether what is drawn next follows from the probabilities of what was drawn so
            far (EAGLE-2, arXiv 2406.16858). What is drawn is sent.
    """

    shape = DraftShape.TREE

    def __init__(
        self,
        head: HeadScorer,
        truncation: Truncation,
        acceptance: AcceptanceByDepth,
        largest_tree: int,
        *,
        prompt_tokens: int = PROMPT_TOKENS,
        certain: bool = False,
        confident: bool = False,
    ) -> None:
        self._head, self._truncation = head, truncation
        self._acceptance, self._certain, self._confident = acceptance, certain, confident
        self.largest_tree = largest_tree
        self.wants = FeatureSpec(head.reads, head.hidden_size, prompt_tokens=prompt_tokens)
        self.made_for = head.made_for

    def draft(self, sequence: DraftSequence, round_: int, gamma: int, budget: int) -> Steps[Draft]:
        """Level by level, behind true pairs."""
        feed = self._news(sequence)
        if feed is None:
            return Draft.certain(())
        nodes = min(budget, self.largest_tree)
        acceptance = deepened(self._acceptance, min(gamma, self._head.depths))
        shape = shape_of(acceptance, nodes)
        # Tokens that are not drawn have no probabilities.
        confident = self._confident and not (self._certain or sequence.sampling.greedy)
        depths = len(shape.levels)
        grown = _Grown([], [], {0: 0})
        counts = dict(shape.counts(0))
        reached = {0: 1.0}
        for depth in range(depths):
            behind = [place for place in counts if counts[place]]
            drawn = yield self._draw(sequence, feed, round_, grown, nodes, list(counts.values()))
            first = len(grown.drawn)
            grown.drawn += drawn
            grown.places += [place for place in behind for _ in range(counts[place])]
            if depth + 1 == depths:
                break
            if confident:
                reached = yield from self._reach(grown, first, reached)
                size = len(shape.levels[depth + 1])
                counts = _worthiest(reached, acceptance[depth + 1], size)
            else:
                counts = {first + 1 + node: n for node, n in shape.counts(depth + 1).items()}
            feed = self._behind(sequence, grown, list(counts))
        tree: DrawnTree = yield ToHost(grown.drawn, grown.places, distinct=True)
        return tree.draft

    def _news(self, sequence: DraftSequence) -> Feed | None:
        """The true pairs that came; None if the newest feature is not there yet."""
        tokens, end = sequence.token_ids, sequence.features.end
        if end != len(tokens) - 1:
            return None
        news = sequence.features.take()
        if not news:
            return None
        if sequence.state is None:
            sequence.state = _Held()
        held: _Held = sequence.state
        (cache,) = sequence.caches
        if news[0].first != held.end:  # behind a gap
            held.begins = held.end = news[0].first
        cache.rollback(held.end - held.begins)
        first, held.end = held.end, end
        known = [min(token, self._head.vocab_size - 1) for token in tokens[first + 1 :]]
        return Feed(cache, known, 1, features=[part.states for part in news])

    def _draw(
        self,
        sequence: DraftSequence,
        feed: Feed,
        round_: int,
        grown: _Grown,
        nodes: int,
        counts: list[int],
    ) -> Draw:
        sampling = sequence.sampling
        return Draw(
            self._head,
            feed,
            replace(sampling, temperature=0.0) if self._certain else sampling,
            self._truncation,
            sequence.vocab_size,
            sequence.numbers,
            round_,
            len(grown.drawn),
            nodes,
            counts,
            distinct=True,
        )

    def _behind(self, sequence: DraftSequence, grown: _Grown, behind: Sequence[int]) -> Feed:
        """Drawn nodes, to be computed behind the places that they hang at."""
        parents = [grown.rows[grown.places[place - 1]] for place in behind]
        count = len(grown.rows)
        grown.rows |= {place: count + i for i, place in enumerate(behind)}
        (cache,) = sequence.caches
        return Feed(cache, [grown.drawn[place - 1] for place in behind], len(behind), parents)

    def _reach(
        self, grown: _Grown, first: int, reached: dict[int, float]
    ) -> Steps[dict[int, float]]:
        """The probability that the head gives the path to each place of the level just drawn."""
        read = yield ReadTokens(grown.drawn[first:], shares=True)
        return {
            first + 1 + i: reached[grown.places[first + i]] * share
            for i, (_, share) in enumerate(read)
        }


def _worthiest(reached: dict[int, float], acceptance: Sequence[float], size: int) -> dict[int, int]:
    """How many children each place gets: the likeliest so many of a level."""
    waiting = [(-reach * acceptance[0], place, 0) for place, reach in reached.items()]
    heapq.heapify(waiting)
    counts: dict[int, int] = {}
    for _ in range(size):
        if not waiting:
            break
        _, place, rank = heapq.heappop(waiting)
        counts[place] = rank + 1
        if rank + 1 < len(acceptance):
            heapq.heappush(waiting, (-reached[place] * acceptance[rank + 1], place, rank + 1))
    return dict(sorted(counts.items()))


class OfPairs(OfHead):
    """A recipe with a head that reads pairs.

    Attributes:
        grow: "static" has one shape for each size; "confidence" chooses what is expanded by what
            was drawn (EAGLE-2).
        prompt_tokens: last ones of a prompt whose features are wanted.
    """

    grow: Annotated[
        Literal["static", "confidence"],
        Setting("grow", "what a draft's shape follows from: its size alone, or what was drawn"),
    ] = "static"
    prompt_tokens: Annotated[
        int,
        Field(ge=1, le=_MOST_PROMPT),
        Setting("prompt_tokens", "the prompt's last tokens whose hidden states the head reads"),
    ] = PROMPT_TOKENS

    @property
    def unmeasured(self) -> AcceptanceByDepth:
        """Acceptance of a head that does not say its own."""
        return ((0.6, 0.1, 0.05), (0.55, 0.1, 0.05))

    def make(self, scorers: Sequence[Scorer], truncation: Truncation) -> PairsDrafter:
        """See `Recipe`."""
        head = cast("HeadScorer", scorers[0])
        kind = cast("type[PairsDrafter]", self.drafter)
        return kind(
            head,
            truncation,
            self.acceptance or head.acceptance or self.unmeasured,
            self.max_nodes,
            prompt_tokens=self.prompt_tokens,
            certain=self.certain,
            confident=self.grow == "confidence",
        )

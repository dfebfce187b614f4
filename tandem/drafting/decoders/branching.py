"""Drafts with branches by a small decoder: what all of them share, whatever they draw."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Annotated, ClassVar

from pydantic import Field

from tandem.drafting.decoders.growth import Growth
from tandem.drafting.decoders.model import ModelDrafter, cache_of, publish
from tandem.drafting.decoders.ranks import Ranks
from tandem.drafting.drafter import DraftSequence, Setting, Traits
from tandem.drafting.stop import FIXED, Stop
from tandem.engine.answers import DrawnTree
from tandem.engine.asks import Draw, Steps, ToHost, Truncation
from tandem.engine.scorer import Scorer
from tandem.inference.feed import Feed
from tandem.speculation.draft import Draft
from tandem.speculation.tree import MOST_NODES

# The key of the largest tree, for recipes; a round's budget may be less.
LargestTree = Annotated[
    int, Field(ge=1, le=MOST_NODES), Setting("max_nodes", "most tokens of a draft")
]
LARGEST_TREE = 16


@dataclass(eq=False)
class _Held:
    """What a sequence's cache holds.

    Attributes:
        trunk: tokens.
        behind: branch row of each place that was computed while the last draft grew.
        draft: the last one.
        rows: branch row of each of its nodes that was computed.
        ranks: what the text has shown of siblings, for a method that learns it.
    """

    trunk: list[int]
    behind: dict[int, int] = field(default_factory=dict)
    draft: Draft | None = None
    rows: dict[int, int] = field(default_factory=dict)
    ranks: Ranks | None = None


class BranchingDrafter(ModelDrafter):
    """Grows a tree level by level: a level is one pass over the inner nodes of the one above.

    Leaves are drawn and never computed, so a draft takes as many passes as it is deep.

    Attributes:
        distinct: whether siblings are drawn without replacement.

    Args:
        scorer: the small model.
        truncation: of its distributions.
        largest_tree: most tokens of a draft.
        stop: after which tokens nothing is drawn.
    """

    distinct: ClassVar[bool] = False
    # A tree may be less deep than was asked for, and greedy siblings have a certain row each.
    traits = Traits(prepares=True)

    def __init__(
        self, scorer: Scorer, truncation: Truncation, largest_tree: int, stop: Stop = FIXED
    ) -> None:
        super().__init__(scorer, truncation, stop)
        self.traits = replace(self.traits, largest_tree=largest_tree)

    def open(self, sequence: DraftSequence) -> Steps[None]:
        """Take the prompt in."""
        yield from super().open(sequence)
        sequence.state = _Held(sequence.state)

    def draft(self, sequence: DraftSequence, round_: int, gamma: int, budget: int) -> Steps[Draft]:
        """Level by level, each token drawn after a place that is computed once."""
        nodes = min(budget, self.traits.largest_tree)
        growth = Growth(nodes)
        yield from self.grow(sequence, round_, gamma, nodes, growth)
        grown: DrawnTree = yield ToHost(growth.drawn, growth.places, distinct=self.distinct)
        self.hold(sequence, grown)
        return grown.draft

    def _end_of_level(
        self, sequence: DraftSequence, growth: Growth, first: int, depth: int
    ) -> Steps[set[int]]:
        """The places of the level just drawn that more may be drawn after.

        Args:
            sequence: that the draft continues.
            growth: after its last level.
            first: draw of that level.
            depth: that the draft may have.
        """
        if sequence.threshold is not None:
            sequence.threshold.asked = depth
        drawn = growth.drawn[first:]
        strong = yield from self._go_on_behind(sequence, drawn)
        return {first + 1 + i for i, goes_on in enumerate(strong) if goes_on}

    @abstractmethod
    def grow(
        self, sequence: DraftSequence, round_: int, gamma: int, nodes: int, growth: Growth
    ) -> Steps[None]:
        """Draw nodes up to a number, at most `gamma` deep; at least one.

        Args:
            sequence: that they continue.
            round_: keys the numbers.
            gamma: tokens of the longest path.
            nodes: at least 1.
            growth: grows; what others drew stays as it is.
        """

    def hold(self, sequence: DraftSequence, grown: DrawnTree) -> None:
        """Note which nodes of the draft that came of it all are in the cache."""
        held: _Held = sequence.state
        held.draft = grown.draft
        if sequence.threshold is not None:
            sequence.threshold.drafted = grown.draft.depth
        held.rows = {
            node: held.behind[draw + 1]
            for node, draw in enumerate(grown.draws)
            if draw + 1 in held.behind
        }
        cache_of(sequence).note(held.rows)

    def _news(self, sequence: DraftSequence) -> Feed:
        """What was emitted and is not in the trunk yet; its last token's row is the root's."""
        held: _Held = sequence.state
        news = sequence.token_ids[len(held.trunk) :]
        held.trunk += news
        return Feed(cache_of(sequence), self.known(news), 1)

    def _draw(
        self,
        sequence: DraftSequence,
        feed: Feed,
        round_: int,
        growth: Growth,
        behind: Sequence[int],
        counts: Sequence[int],
    ) -> Steps[Draw]:
        """An ask for a number of draws at each place that a feed computes, numbered after those of
        the round so far."""
        shaped = yield from growth.shaped(sequence, behind)
        return Draw(
            scorer=self.scorer,
            feed=feed,
            sampling=sequence.sampling,
            truncation=self.truncation,
            vocab_size=sequence.vocab_size,
            numbers=sequence.numbers,
            round=round_,
            node=len(growth.drawn),
            nodes=growth.most,
            counts=counts,
            distinct=self.distinct,
            shaped=shaped,
            confident=self._stop.early,
        )

    def _inner(self, sequence: DraftSequence, nodes: Sequence[int], growth: Growth) -> Feed:
        """Drawn nodes, to be computed in one pass after the places that they hang at."""
        held: _Held = sequence.state
        parents = [held.behind.get(growth.places[node], 0) for node in nodes]
        held.behind |= {node + 1: len(held.behind) + i for i, node in enumerate(nodes, 1)}
        tokens = [growth.drawn[node] for node in nodes]
        return Feed(cache_of(sequence), tokens, len(nodes), parents)

    def observe(self, sequence: DraftSequence, emitted: Sequence[int]) -> None:
        """Keep the path that came out, as far as it was computed. Computes nothing."""
        if sequence.threshold is not None:
            sequence.threshold.learn(len(emitted) - 1)
        held: _Held = sequence.state
        path: Sequence[int] = ()
        if held.draft is not None:
            path = held.draft.tree.follow(held.draft.token_ids, emitted[:-1])
        kept = list(takewhile(held.rows.__contains__, (place - 1 for place in path)))
        cache = cache_of(sequence)
        cache.keep([held.rows[node] for node in kept])
        held.behind, held.draft, held.rows = {}, None, {}
        sequence.token_ids.extend(emitted)
        held.trunk += sequence.token_ids[len(held.trunk) : cache.length]
        publish(sequence)

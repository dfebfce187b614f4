"""Trees by a small decoder: siblings without replacement, one pass a level."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from tandem.drafting.decoders.branching import LARGEST_TREE, BranchingDrafter, LargestTree
from tandem.drafting.decoders.growth import Growth
from tandem.drafting.decoders.model import OfModel
from tandem.drafting.decoders.ranks import Ranks
from tandem.drafting.decoders.shape import ACCEPTANCE, TreeShape, drawn_numbers, falls, likeliest
from tandem.drafting.drafter import DraftSequence, Setting, Traits
from tandem.drafting.stop import FIXED, Stop
from tandem.engine.asks import Steps, Truncation
from tandem.engine.scorer import Scorer
from tandem.speculation.tree import DraftShape


class TreeDrafter(BranchingDrafter):
    """Draws the tree that is likeliest to be kept, whatever its tokens turn out to be.

    Siblings are drawn without replacement (Sequoia, arXiv 2402.12374). The tokens stay on the
    device until the end. At temperature 0 siblings are the likeliest tokens, each certain.

    Args:
        scorer: the small model.
        truncation: of its distributions.
        acceptance: by sibling rank, from which the shape follows, and which a text corrects by
            what it kept.
        largest_tree: most tokens of a draft.
        stop: after which tokens nothing is drawn; the rest of the shape stays as it is.
    """

    traits = Traits(shape=DraftShape.TREE, prepares=True)
    distinct = True

    def __init__(
        self,
        scorer: Scorer,
        truncation: Truncation,
        acceptance: Sequence[float],
        largest_tree: int,
        stop: Stop = FIXED,
    ) -> None:
        super().__init__(scorer, truncation, largest_tree, stop)
        self._acceptance = tuple(acceptance)

    def open(self, sequence: DraftSequence) -> Steps[None]:
        """Take the prompt in."""
        yield from super().open(sequence)
        sequence.state.ranks = Ranks(self._acceptance)

    def observe(self, sequence: DraftSequence, emitted: Sequence[int]) -> None:
        """Keep the path that came out, as far as it was computed, and learn from it."""
        held = sequence.state
        if held.draft is not None:
            held.ranks.see(held.draft, emitted[:-1])
        super().observe(sequence, emitted)

    def grow(
        self, sequence: DraftSequence, round_: int, gamma: int, nodes: int, growth: Growth
    ) -> Steps[None]:
        """Level by level; the shape is known before anything is drawn, but for branches that end
        early."""
        shape = _shape(sequence.state.ranks.acceptance, gamma, nodes)
        feed = self._news(sequence)
        # The places whose rows the feed gives, by their number in the shape's level.
        behind = {0: 0}
        for depth in range(len(shape.levels)):
            level = shape.counts(depth)
            drawn_at = drawn_numbers(level, behind)
            counts = [count for parent, count in level.items() if parent in behind]
            first = len(growth.drawn)
            places = list(behind.values())
            ask = yield from self._draw(sequence, feed, round_, growth, places, counts)
            if not depth:
                ask.earlier = growth.first
            growth.add((yield ask), places, counts)
            if depth + 1 == len(shape.levels):
                break
            strong = yield from self._end_of_level(sequence, growth, first, len(shape.levels))
            at = {number: first + 1 + i for i, number in enumerate(drawn_at)}
            inner = shape.counts(depth + 1)
            behind = {n: at[n] for n in inner if n in at and at[n] in strong}
            if not behind:
                break
            feed = self._inner(sequence, [place - 1 for place in behind.values()], growth)

    def useful(self, gamma: int) -> int:
        """Nodes that it can use at most so deep."""
        return len(_shape(self._acceptance, gamma, self.traits.largest_tree))


# Texts share most of their shapes; those of long ago are made again.
@lru_cache(maxsize=4096)
def _shape(acceptance: tuple[float, ...], gamma: int, nodes: int) -> TreeShape:
    return likeliest(acceptance, gamma, nodes)


def _falling(value: tuple[float, ...]) -> tuple[float, ...]:
    if not falls(value):
        raise ValueError("must be shares in (0, 1] that fall with the sibling's rank")
    return value


Acceptance = Annotated[
    tuple[float, ...],
    Field(min_length=1, max_length=16),
    AfterValidator(_falling),
    Setting(
        "acceptance",
        "probability that the first, second, ... sibling is accepted; it sets the shape",
    ),
]


class TreeRecipe(OfModel):
    """The recipe of `tree`."""

    drafts: ClassVar = "a tree by a small decoder, siblings without replacement"
    drafter: ClassVar = TreeDrafter

    method: Literal["tree"] = "tree"
    acceptance: Acceptance = ACCEPTANCE
    max_nodes: LargestTree = LARGEST_TREE

    @property
    def largest_tree(self) -> int:
        """As the key says."""
        return self.max_nodes

    def make(self, scorers: Sequence[Scorer], truncation: Truncation) -> TreeDrafter:
        """See `Recipe`."""
        return TreeDrafter(scorers[0], truncation, self.acceptance, self.max_nodes, self.stops)

"""Trees by Medusa's heads: all of a tree from one hidden state of the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal, cast

from tandem.drafting.drafter import Drafter, DraftSequence
from tandem.drafting.features import FeatureSpec
from tandem.drafting.heads.head import AcceptanceByDepth, OfHead, deepened, shape_of
from tandem.engine.asks import Draw, DrawnTree, Steps, ToHost, Truncation
from tandem.engine.scorer import HeadScorer, Scorer
from tandem.inference.feed import Feed
from tandem.speculation.draft import Draft
from tandem.speculation.nodes import DraftShape

# Of the heads of the embedded target.
_ACCEPTANCE: AcceptanceByDepth = ((0.33, 0.08, 0.04, 0.03), (0.24, 0.06, 0.03, 0.02))


class MedusaDrafter(Drafter):
    """Draws every place of a depth from the row of one head (Medusa, arXiv 2401.10774).

    The first head's token follows the emitted one, which no head knows: its feature is computed by
    the next pass. So a row of a depth is the same at all places of that depth, and one pass gives
    the whole tree. Siblings are drawn without replacement. It drafts only behind the newest
    feature.

    Args:
        head: with a row a depth.
        truncation: of the rows.
        acceptance: by depth and sibling rank, from which the shape follows; deeper levels are like
            the last one.
        largest_tree: most tokens of a draft.
        certain: whether the likeliest tokens are sent as certain ones, and none is drawn.
    """

    shape = DraftShape.TREE

    def __init__(
        self,
        head: HeadScorer,
        truncation: Truncation,
        acceptance: AcceptanceByDepth,
        largest_tree: int,
        *,
        certain: bool = False,
    ) -> None:
        self._head, self._truncation, self._certain = head, truncation, certain
        self._acceptance = deepened(acceptance, head.depths)
        self.largest_tree = largest_tree
        self.wants = FeatureSpec(head.reads, head.hidden_size)
        self.made_for = head.made_for

    def draft(self, sequence: DraftSequence, round_: int, gamma: int, budget: int) -> Steps[Draft]:
        """All of a tree from one pass."""
        news = sequence.features.take()
        if not news or news[-1].end != len(sequence.token_ids) - 1:
            return Draft.certain(())
        shape = shape_of(self._acceptance[:gamma], min(budget, self.largest_tree))
        places = shape.parents()
        behind = [list(shape.counts(depth).items()) for depth in range(len(shape.levels))]
        rows = [depth for depth, level in enumerate(behind) for _ in level]
        sampling = sequence.sampling
        (cache,) = sequence.caches
        drawn = yield Draw(
            self._head,
            Feed(cache, sequence.token_ids[-1:], len(behind), features=[news[-1].states[-1:]]),
            replace(sampling, temperature=0.0) if self._certain else sampling,
            self._truncation,
            sequence.vocab_size,
            sequence.numbers,
            round_,
            0,
            len(places),
            [count for level in behind for _, count in level],
            distinct=True,
            rows=rows,
        )
        grown: DrawnTree = yield ToHost(drawn, places, distinct=True)
        return grown.draft


class MedusaRecipe(OfHead):
    """The recipe of `medusa`."""

    drafts: ClassVar = "a tree by Medusa's heads, from a hidden state of the target"
    drafter: ClassVar = MedusaDrafter

    method: Literal["medusa"] = "medusa"

    def make(self, scorers: Sequence[Scorer], truncation: Truncation) -> MedusaDrafter:
        """See `Recipe`."""
        head = cast("HeadScorer", scorers[0])
        acceptance = self.acceptance or head.acceptance or _ACCEPTANCE
        return MedusaDrafter(head, truncation, acceptance, self.max_nodes, certain=self.certain)

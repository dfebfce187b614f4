"""Trees by Medusa's heads: all of a tree from one hidden state of the target."""

from __future__ import annotations

from typing import ClassVar, Literal

from tandem.drafting.drafter import DraftSequence
from tandem.drafting.heads.head import HeadDrafter, OfHead
from tandem.engine.answers import DrawnTree
from tandem.engine.asks import Steps, ToHost
from tandem.speculation.draft import Draft


class MedusaDrafter(HeadDrafter):
    """Draws every place of a depth from the row of one head (Medusa, arXiv 2401.10774).

    The first head's token follows the emitted one, which no head knows: its feature is computed by
    the next pass. So a row of a depth is the same at all places of that depth, and one pass gives
    the whole tree. Siblings are drawn without replacement.
    """

    def draft(self, sequence: DraftSequence, round_: int, gamma: int, budget: int) -> Steps[Draft]:
        """All of a tree from one pass."""
        shape = self._shape(gamma, budget)
        places = shape.parents()
        behind = [list(shape.counts(depth).items()) for depth in range(len(shape.levels))]
        counts = [count for level in behind for _, count in level]
        rows = [depth for depth, level in enumerate(behind) for _ in level]
        feed = self._news(sequence, len(behind))
        if feed is None:
            return Draft.certain(())
        # Which tokens come before a deeper row is not known when it is drawn from.
        shaped = sequence.shaped_rows([None if depth else () for depth in rows])
        drawn = yield self._draw(
            sequence, feed, round_, 0, len(places), counts, rows=rows, shaped=shaped
        )
        grown: DrawnTree = yield ToHost(drawn, places, distinct=True)
        return grown.draft


class MedusaRecipe(OfHead):
    """The recipe of `medusa`."""

    drafts: ClassVar = "a tree by Medusa's heads, from a hidden state of the target"
    drafter: ClassVar = MedusaDrafter
    unmeasured: ClassVar = ((0.33, 0.08, 0.04, 0.03), (0.24, 0.06, 0.03, 0.02))

    method: Literal["medusa"] = "medusa"

"""Several chains by a small decoder, drawn independently; common beginnings are one place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from tandem.drafting.decoders.branching import LARGEST_TREE, BranchingDrafter, LargestTree
from tandem.drafting.decoders.growth import Growth
from tandem.drafting.decoders.model import OfModel
from tandem.drafting.drafter import Drafter, DraftSequence, Setting, Traits
from tandem.drafting.stop import FIXED, Stop
from tandem.engine.asks import ReadTokens, Steps, Truncation
from tandem.engine.scorer import Scorer
from tandem.speculation.tree import DraftShape


class ChainsDrafter(BranchingDrafter):
    """Draws chains side by side, as deep as asked for (SpecInfer, SpecTr).

    Chains that agree so far share their place, which is computed once: all of them draw from the
    very row that is sent. A draw that repeats a sibling is a twin, so that the draws at a place
    are as many as the chains that reach it. At temperature 0 all chains would be one, and one is
    drawn.

    Args:
        scorer: the small model.
        truncation: of its distributions.
        chains: their number; fewer where the nodes of a draft do not suffice.
        largest_tree: most tokens of a draft.
        stop: after which tokens all chains that reach them end.
    """

    traits = Traits(shape=DraftShape.IID_CHAINS, prepares=True)

    def __init__(
        self,
        scorer: Scorer,
        truncation: Truncation,
        chains: int,
        largest_tree: int,
        stop: Stop = FIXED,
    ) -> None:
        super().__init__(scorer, truncation, largest_tree, stop)
        self._chains = chains

    def grow(
        self, sequence: DraftSequence, round_: int, gamma: int, nodes: int, growth: Growth
    ) -> Steps[None]:
        """A level is a draw of every chain; which of them agree is known before the next one."""
        gamma = min(gamma, nodes)
        chains = 1 if sequence.sampling.greedy else min(self._chains, nodes // gamma)
        feed = self._news(sequence)
        reached = {0: chains}  # by how many chains, each place of the level
        for depth in range(gamma):
            first = len(growth.drawn)
            counts = list(reached.values())
            ask = yield from self._draw(sequence, feed, round_, growth, list(reached), counts)
            drawn = yield ask
            growth.add(drawn, list(reached), counts)
            if depth + 1 < gamma:
                # A single chain has no other to agree with, and waits for nothing.
                token_ids = (yield ReadTokens(drawn)) if chains > 1 else [0]
                strong = yield from self._end_of_level(sequence, growth, first, gamma)
                home: dict[tuple[int, int], int] = {}
                reached = {}
                for node, token_id in enumerate(token_ids, first):
                    place = home.setdefault((growth.places[node], token_id), node + 1)
                    if place in strong:
                        reached[place] = reached.get(place, 0) + 1
                if not reached:
                    break
                feed = self._inner(sequence, [place - 1 for place in reached], growth)


# SpecTr's tables end at 8; the draws at one place are judged one after the other.
MOST_CHAINS = 16


class ChainsRecipe(OfModel):
    """The recipe of `chains`."""

    drafts: ClassVar = "several independent chains by a small decoder, common beginnings merged"
    drafter: ClassVar = ChainsDrafter

    method: Literal["chains"] = "chains"
    chains: Annotated[
        int,
        Field(ge=1, le=MOST_CHAINS),
        Setting(
            "chains",
            "number of chains; fewer if the round's budget is too small for all at full length",
        ),
    ] = 4
    max_nodes: LargestTree = LARGEST_TREE

    @property
    def largest_tree(self) -> int:
        """As the key says."""
        return self.max_nodes

    def make(self, scorers: Sequence[Scorer], truncation: Truncation) -> Drafter:
        """See `Recipe`."""
        return ChainsDrafter(scorers[0], truncation, self.chains, self.max_nodes, self.stops)

"""How likely drafted tokens are kept: by depth, and by rank among siblings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from tandem.drafting.decoders.shape import ACCEPTANCE
from tandem.peers.text.contracts import DraftReply, VerdictReply
from tandem.speculation.tree import Tree

# What counts as one observation: of the first of all siblings, the second, and later ones.
PRIOR = ACCEPTANCE
# Drafts that an estimate looks back on: its error is 0.05, and a drafter that turns bad is left
# within twenty rounds.
_MEMORY = 12
# Observations that the estimate of all texts is worth to a text, or the chance above to a depth.
_OTHERS_WORTH = 8


@dataclass(slots=True)
class Share:
    """A mean of observations, of which older ones count for less."""

    total: float = 0.0
    count: float = 0.0

    def fade(self, factor: float) -> None:
        """Have what was observed count for less."""
        self.total *= factor
        self.count *= factor

    def add(self, observed: float) -> None:
        """Take an observation in."""
        self.total += observed
        self.count += 1

    def against(self, other: float, worth: float) -> float:
        """The mean, with another estimate that counts as a number of observations."""
        return (self.total + worth * other) / (self.count + worth)


@dataclass(frozen=True, slots=True)
class Chances:
    """That a node is kept where its parent is.

    Attributes:
        first: of first siblings, by depth from 0.
        later: of later ones, by rank from 1; the last one is of all further ranks too.
    """

    first: Sequence[float]
    later: Sequence[float]

    def of(self, depth: int, rank: int) -> float:
        """Of a node of a depth, from 1, and a rank, from 0."""
        return self.later[min(rank, len(self.later)) - 1] if rank else self.first[depth - 1]


class AcceptanceEstimate:
    """What was observed of drafts: by one text, with what all texts observed.

    Args:
        everyone: the estimate of all texts; None for that one itself.
    """

    def __init__(self, everyone: AcceptanceEstimate | None = None) -> None:
        self._everyone = everyone
        self._first: defaultdict[int, Share] = defaultdict(Share)
        self._later = [Share() for _ in PRIOR[1:]]

    def chances(self, depth: int) -> Chances:
        """Of nodes down to a depth. Of all texts, a depth without observations is as the one above
        it."""
        own = [self._first[at] for at in range(depth)]
        if self._everyone is not None:
            behind, worth = self._everyone.chances(depth), _OTHERS_WORTH
            first = [at.against(of, worth) for at, of in zip(own, behind.first, strict=True)]
        else:
            behind, worth = Chances((), PRIOR[1:]), 1
            top = self._first[0].against(PRIOR[0], worth)
            down = accumulate(own[1:], lambda of, at: at.against(of, _OTHERS_WORTH), initial=top)
            first = list(down)[:depth]
        later = [at.against(of, worth) for at, of in zip(self._later, behind.later, strict=True)]
        return Chances(first, later)

    def fade(self) -> None:
        """What was observed is from long ago: a few drafts count for as much."""
        for share in (*self._first.values(), *self._later):
            share.fade(_OTHERS_WORTH / max(share.count, _OTHERS_WORTH))

    def observe(self, drafted: DraftReply, decided: VerdictReply) -> None:
        """Observe what became of a draft, where its context was emitted."""
        for share in self._first.values():
            share.fade(1 - 1 / _MEMORY)
        for depth, child in enumerate(drafted.tree.first_children(decided.place)):
            self._first[depth].add(min(decided.overlaps[child - 1], 1.0))
        for rank, kept in _later_siblings(drafted.tree, decided.place):
            share = self._later[min(rank, len(self._later)) - 1]
            share.fade(1 - 1 / _MEMORY)
            share.add(kept)
        if self._everyone is not None:
            self._everyone.observe(drafted, decided)


def _later_siblings(tree: Tree, place: int) -> list[tuple[int, bool]]:
    """Of each that hangs on the way to a place or there, deepest first: its rank, and whether it
    was kept."""
    path = [0, *tree.path_to(place)]
    seen: list[tuple[int, bool]] = []
    for at, kept in zip(path[::-1], [None, *path[:0:-1]], strict=True):
        later = enumerate(tree.children_of(at)[1:], 1)
        seen += [(rank, sibling == kept) for rank, sibling in later]
    return seen

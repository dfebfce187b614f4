"""The tree structure of a draft, and the kinds and sizes of drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

# Most nodes of a tree, which a target computes in one pass for one text.
# Tokens of the longest path of a round. The orchestrator's GAMMA has the same bound.
LONGEST_DRAFT = 64
MOST_NODES = 256


class DraftShape(IntEnum):
    """Kinds of drafts. A chain is a special case of both other kinds."""

    CHAIN = 1
    TREE = 2
    IID_CHAINS = 3


@dataclass(frozen=True, slots=True)
class DraftSize:
    """The most that a round drafts.

    Attributes:
        gamma: tokens of the longest path; 0 drafts nothing.
        nodes: tokens in all, of a tree; 0 where drafts are chains, or for none beside gamma.
    """

    gamma: int
    nodes: int = 0


@dataclass(frozen=True, slots=True)
class Tree:
    """Where the nodes of a draft hang. Place 0 is the root, place i + 1 is after node i.

    Attributes:
        parents: the place that each node hangs at, which is before its own; a range where they are
            a chain.
    """

    parents: Sequence[int]

    @classmethod
    def of(cls, parents: Sequence[int] | None, count: int) -> Tree:
        """The tree of a number of nodes; without parents, a chain."""
        return cls(range(count) if parents is None else parents)

    @property
    def depth(self) -> int:
        """Nodes of the longest path."""
        return len(self.parents) if isinstance(self.parents, range) else max(self.depths)

    @property
    def depths(self) -> list[int]:
        """Of each place: the nodes on the way to it."""
        depths = [0]
        for place in self.parents:
            depths.append(depths[place] + 1)
        return depths

    @property
    def ranks(self) -> list[int]:
        """Of each node: how many siblings it has before it."""
        counts = [0] * (len(self.parents) + 1)
        ranks = []
        for place in self.parents:
            ranks.append(counts[place])
            counts[place] += 1
        return ranks

    @property
    def children(self) -> list[list[int]]:
        """Of each place: the places of the nodes that hang there, in order."""
        found: list[list[int]] = [[] for _ in range(len(self.parents) + 1)]
        for place, parent in enumerate(self.parents, 1):
            found[parent].append(place)
        return found

    def path_to(self, place: int) -> Sequence[int]:
        """The places on the way from the root to a place, without the root."""
        if isinstance(self.parents, range):
            return range(1, place + 1)
        path: list[int] = []
        while place:
            path.append(place)
            place = self.parents[place - 1]
        return path[::-1]

    def children_of(self, place: int) -> Sequence[int]:
        """The places of the nodes that hang at a place, in order."""
        if isinstance(self.parents, range):
            return range(place + 1, min(place + 1, len(self.parents)) + 1)
        return [at for at, parent in enumerate(self.parents, 1) if parent == place]

    def is_leaf(self, place: int) -> bool:
        """Whether nothing hangs at a place."""
        return not self.children_of(place)

    def ranks_to(self, place: int) -> list[tuple[int, int]]:
        """Of each node on the way to a place: its rank among its siblings, and how many others
        there are."""
        if isinstance(self.parents, range):
            return [(0, 0)] * place
        found: list[tuple[int, int]] = []
        for at in self.path_to(place):
            siblings = self.children_of(self.parents[at - 1])
            found.append((siblings.index(at), len(siblings) - 1))
        return found

    def first_children(self, place: int) -> list[int]:
        """On the way to a place and there: the place of the first node that hangs at each."""
        if isinstance(self.parents, range):
            return list(range(1, min(place + 1, len(self.parents)) + 1))
        found = (self.children_of(at) for at in (0, *self.path_to(place)))
        return [children[0] for children in found if children]

    def follow(self, token_ids: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """The places that tokens lead to from the root, one after the other, as far as nodes have
        them; of siblings with one token, the first.

        Args:
            token_ids: of the nodes.
            tokens: to follow.
        """
        first: dict[tuple[int, int], int] = {}
        for at, node in enumerate(zip(self.parents, token_ids, strict=True), 1):
            first.setdefault(node, at)
        path: list[int] = []
        for token_id in tokens:
            place = first.get((path[-1] if path else 0, token_id))
            if place is None:
                break
            path.append(place)
        return path

    def homes(self, token_ids: Sequence[int]) -> Sequence[int]:
        """The place that each node leads to: its own; for a twin, which repeats an earlier
        sibling's token, that sibling's."""
        if isinstance(self.parents, range):
            return range(1, len(self.parents) + 1)
        first: dict[tuple[int, int], int] = {}
        nodes = zip(self.parents, token_ids, strict=True)
        return [first.setdefault(node, place) for place, node in enumerate(nodes, 1)]

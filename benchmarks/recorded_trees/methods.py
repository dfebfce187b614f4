"""The drafts that are compared: which of the recorded nodes each has, and who decides it.

All methods share nodes, so that they are paired as far as they can be: a chain is a tree's path of
first siblings, and the first of several chains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.sweep.branching import Grown, Node
from tandem.drafting.shape import TreeShape
from tandem.speculation.proposal import Proposal


@dataclass(frozen=True)
class Drafted:
    """A kind of draft.

    Attributes:
        name: for people.
        nodes: of the recorded ones, in the order drawn: a place's before what hangs there.
        distinct: siblings are without replacement.
        merged: common beginnings of chains are one place, and repeated draws are twins.
    """

    name: str
    nodes: tuple[int, ...]
    distinct: bool = False
    merged: bool = False


class Plan:
    """Nodes to record, and the drafts that are made of them.

    Args:
        longest: of the chain that all share.
    """

    def __init__(self, longest: int) -> None:
        self.nodes = [Node(place) for place in range(longest)]
        self._longest = longest

    def chain(self, length: int) -> Drafted:
        """The chain that all share, cut."""
        return Drafted(f"chain of {length}", tuple(range(length)))

    def tree(self, name: str, shape: TreeShape) -> Drafted:
        """A tree around the chain, siblings without replacement."""
        mine: list[int] = []
        siblings: dict[int, list[int]] = {}
        for place in shape.parents():
            at = mine[place - 1] + 1 if place else 0
            earlier = siblings.setdefault(at, [])
            # The chain's own node is the first sibling of each place of the chain.
            if not earlier and at < self._longest:
                node = at
            else:
                node = self._add(Node(at, without=tuple(earlier)))
            earlier.append(node)
            mine.append(node)
        return Drafted(name, tuple(mine), distinct=True)

    def path(self, length: int, model: int = 0, *, without: bool = False) -> list[int]:
        """One more chain, drawn alone; or its first token not the shared chain's."""
        path = [self._add(Node(0, model, (0,) if without else ()))]
        for _ in range(length - 1):
            path.append(self._add(Node(path[-1] + 1, model)))
        return path

    def chains(
        self, name: str, paths: Sequence[Sequence[int]], *, distinct: bool = False
    ) -> Drafted:
        """Several chains, level by level; siblings are independent or, by `distinct`, not."""
        nodes = tuple(node for level in zip(*paths, strict=True) for node in level)
        return Drafted(name, nodes, distinct=distinct, merged=not distinct)

    def _add(self, node: Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1


def proposal_of(drafted: Drafted, nodes: Sequence[Node], grown: Grown) -> Proposal:
    """The drafts [S, n] as a rule sees them, in float64."""
    ids = list(drafted.nodes)
    tokens, q = grown.tokens[:, ids], grown.q[:, ids].double()
    local = {node: place for place, node in enumerate(ids, 1)}
    places = [local[nodes[node].place - 1] if nodes[node].place else 0 for node in ids]
    if places == list(range(len(ids))):
        return Proposal.from_dense(tokens, q)
    parents = [places] * len(tokens)
    if drafted.merged:
        parents = [_merged(places, row.tolist()) for row in tokens]
    return Proposal.from_dense(tokens, q, parents=parents, distinct=drafted.distinct)


def _merged(places: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """The places that nodes hang at where equal beginnings are one."""
    home = [0]
    first: dict[tuple[int, int], int] = {}
    parents: list[int] = []
    for node, (place, token) in enumerate(zip(places, tokens, strict=True), 1):
        parents.append(home[place])
        home.append(first.setdefault((home[place], token), node))
    return parents


def rows_of(drafted: Drafted, grown: Grown) -> torch.Tensor:
    """[S, n+1, V], the target's row of each place, in float64."""
    return grown.p[:, [0, *(node + 1 for node in drafted.nodes)]].double()

"""How the nodes of a draft may hang together, and which kinds of drafts there are."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

# Of one draft that is a tree: what a target computes in a pass for one text.
MOST_NODES = 256


class DraftShape(IntEnum):
    """Kinds of drafts. A chain is a case of both others."""

    CHAIN = 1
    TREE = 2
    IID_CHAINS = 3


def path_to(parents: Sequence[int] | None, place: int) -> Sequence[int]:
    """The places on the way from the root to one, the root left out; of a chain without parents."""
    if parents is None:
        return range(1, place + 1)
    path: list[int] = []
    while place:
        path.append(place)
        place = parents[place - 1]
    return path[::-1]


def depth_of(parents: Sequence[int] | None, count: int) -> int:
    """Nodes of the longest path of so many; of a chain without parents."""
    if parents is None:
        return count
    depths = [0]
    for place in parents:
        depths.append(depths[place] + 1)
    return max(depths)

"""The tree structure of a draft, and the kinds and sizes of drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

# Most nodes of a tree, which a target computes in one pass for one text.
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


def path_to(parents: Sequence[int] | None, place: int) -> Sequence[int]:
    """The places from the root to a place, without the root; without parents, those of a chain."""
    if parents is None:
        return range(1, place + 1)
    path: list[int] = []
    while place:
        path.append(place)
        place = parents[place - 1]
    return path[::-1]


def depth_of(parents: Sequence[int] | None, count: int) -> int:
    """Length of the longest path among `count` nodes; without parents, that of a chain."""
    if parents is None:
        return count
    depths = [0]
    for place in parents:
        depths.append(depths[place] + 1)
    return max(depths)

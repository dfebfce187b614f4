"""How the nodes of a draft may hang together, and which kinds of drafts there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem.speculation.draft import Draft

# Of one draft that is a tree: what a target computes in a pass for one text.
MOST_NODES = 256


class Shape(IntEnum):
    """Kinds of drafts. A chain is a case of both others."""

    CHAIN = 1
    TREE = 2
    IID_CHAINS = 3


def check_nodes(draft: Draft) -> str:
    """What is wrong with how nodes hang together, beginning with the field's name.

    Chains of one row a node are sound.
    """
    if draft.is_chain:
        return ""
    named: dict[int, int] = {}
    first: dict[tuple[int, int], int] = {}
    twins: set[int] = set()
    nodes = zip(draft.token_ids, draft.places(), draft.rows_of_nodes(), strict=True)
    for node, (token_id, place, row) in enumerate(nodes):
        if place in twins:
            return (
                f"draft.parents[{node}] = {place} is behind a repeated sibling, whose children"
                " belong to the first one"
            )
        if named.setdefault(row, token_id) != token_id and not draft.sizes[row]:
            return f"draft.row_of[{node}] = {row} is a certain row of another token"
        if first.setdefault((place, token_id), node) != node:
            if draft.distinct:
                return f"draft.token_ids[{node}] = {token_id} repeats one of its distinct siblings"
            twins.add(node + 1)
    return ""


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


def misfit(draft: Draft, takes: Shape) -> str:
    """Why a rule cannot decide a draft of sound shape, beginning with the field's name.

    Args:
        draft: any.
        takes: the widest kind of draft that the rule can decide.
    """
    if draft.is_chain or takes is Shape.TREE:
        return ""
    if takes is Shape.CHAIN:
        return "draft.parents: the verifier takes chains of a row a token"
    return _not_independent(draft)


def _not_independent(draft: Draft) -> str:
    """Why a draft is not several independent chains whose common beginnings are one."""
    if draft.distinct:
        return "draft.distinct_siblings: the verifier takes independent chains"
    rows: dict[int, int] = {}
    home: dict[tuple[int, int], int] = {}
    chains: Counter[int] = Counter()
    draws: Counter[int] = Counter()
    nodes = zip(draft.token_ids, draft.places(), draft.rows_of_nodes(), strict=True)
    for node, (token_id, place, row) in enumerate(nodes):
        if rows.setdefault(place, row) != row:
            return f"draft.row_of[{node}] = {row}: draws at one place must share their row"
        chains[home.setdefault((place, token_id), node + 1)] += 1
        draws[place] += 1
    for place, count in draws.items():
        if place and count != chains[place]:
            return (
                f"draft.parents: {count} draws at place {place}, which {chains[place]} chains reach"
            )
    return ""

"""Drafters as programs, for enumerations: fixed shapes, mixtures, and random ones."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.support.laws.trees.programs import Node, Program


def fixed(name: str, places: Sequence[int], *, distinct: bool = False) -> Program:
    """A program of one drafter that always draws the same shape."""

    def following(nodes: Sequence[Node]) -> Node | None:
        return Node(places[len(nodes)], 0) if len(nodes) < len(places) else None

    return Program(name, following, distinct)


def mixed(name: str, steps: Sequence[tuple[int, int | None]], *, distinct: bool = False) -> Program:
    """A program with nodes of several drafters, and certain ones (drafter None)."""

    def following(nodes: Sequence[Node]) -> Node | None:
        if len(nodes) == len(steps):
            return None
        place, drafter = steps[len(nodes)]
        if drafter is not None:
            return Node(place, drafter)
        taken = {node.token for node in nodes if node.place == place}
        chosen = (len(nodes) + sum(node.token for node in nodes)) % 3
        while distinct and chosen in taken:
            chosen = (chosen + 1) % 3
        return Node(place, None, chosen)

    return Program(name, following, distinct)


def chains(count: int, length: int, *, merged: bool = True) -> Program:
    """Independent chains, drawn level by level; if merged, equal beginnings share places."""

    def following(nodes: Sequence[Node]) -> Node | None:
        if len(nodes) == count * length:
            return None
        chain = len(nodes) % count
        return Node(_end_of(nodes, chain, count, merged), 0)

    return Program(f"{count}x{length} {'merged' if merged else 'apart'}", following)


def _end_of(nodes: Sequence[Node], chain: int, count: int, merged: bool) -> int:
    """The place after a chain's last token."""
    if len(nodes) < count:
        return 0
    last = len(nodes) - count
    assert last % count == chain
    if not merged:
        return last + 1
    home: dict[tuple[int, int], int] = {}
    for i, node in enumerate(nodes):
        home.setdefault((node.place, node.token), i + 1)
    return home[nodes[last].place, nodes[last].token]


def adaptive(name: str = "follows what it drew", *, distinct: bool = True) -> Program:
    """Two siblings; a child of the one with the larger token; a third sibling if the child is 0."""

    def following(nodes: Sequence[Node]) -> Node | None:
        if len(nodes) < 2:
            return Node(0, 0)
        if len(nodes) == 2:
            return Node(1 if nodes[0].token > nodes[1].token else 2, 0)
        if len(nodes) == 3 and nodes[2].token == 0:
            return Node(0, 0)
        return None

    return Program(name, following, distinct)


def random_program(seed: int, most: int = 5, deepest: int = 3) -> Program:
    """Chooses place, drafter, kind of row, or the end, depending on all that was drawn so far."""
    distinct = random.Random(seed).random() < 0.5

    def following(nodes: Sequence[Node]) -> Node | None:
        history = [(node.place, node.drafter, node.token) for node in nodes]
        draw = random.Random(f"{seed} {history}")
        if len(nodes) == most or (nodes and draw.random() < 0.15):
            return None
        depth, twins, seen = [0], set(), set()
        for i, node in enumerate(nodes):
            depth.append(depth[node.place] + 1)
            if (node.place, node.token) in seen:
                twins.add(i + 1)
            seen.add((node.place, node.token))
        places = [p for p, d in enumerate(depth) if d < deepest and p not in twins]
        place = draw.choice(places)
        if draw.random() < 0.25:
            free = [t for t in range(3) if not distinct or (place, t) not in seen]
            return Node(place, None, draw.choice(free)) if free else None
        return Node(place, draw.randrange(2))

    return Program(f"random {seed}", following, distinct)

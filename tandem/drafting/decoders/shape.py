"""Which tree is worth drawing, chosen before anything is drawn."""

from __future__ import annotations

import heapq
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

# By sibling rank, of the embedded pair.
ACCEPTANCE = (0.74, 0.08, 0.035)


@dataclass(frozen=True)
class TreeShape:
    """Places of a tree, level by level.

    Attributes:
        levels: for each depth, of each node the number of its parent in the level above, 0 in
            the first one; ascending, so siblings stand together.
    """

    levels: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        """Nodes."""
        return sum(map(len, self.levels))

    def counts(self, depth: int) -> dict[int, int]:
        """Of a level's parents, how many children each has."""
        found: dict[int, int] = {}
        for parent in self.levels[depth]:
            found[parent] = found.get(parent, 0) + 1
        return found

    def parents(self) -> list[int]:
        """The place that each node hangs at, level by level: 0 the root, i + 1 after node i."""
        places, above, first = [], [0], 0
        for level in self.levels:
            places += [above[number] for number in level]
            above = [first + node + 1 for node in range(len(level))]
            first += len(level)
        return places


def drawn_numbers(counts: Mapping[int, int], behind: Container[int]) -> list[int]:
    """The numbers, within a shape's level, of the nodes that are drawn.

    Args:
        counts: of the level, see `TreeShape.counts`.
        behind: numbers of the level above that more is drawn after.
    """
    found: list[int] = []
    number = 0
    for parent, count in counts.items():
        if parent in behind:
            found += range(number, number + count)
        number += count
    return found


def falls(acceptance: Sequence[float]) -> bool:
    """Whether acceptances by rank are shares in (0, 1] that fall with the rank; at least one."""
    in_order = all(after <= before for before, after in pairwise(acceptance))
    return bool(acceptance) and in_order and 0 < acceptance[-1] <= acceptance[0] <= 1


def expected_tokens(shape: TreeShape, acceptance: Sequence[float]) -> float:
    """Tokens that a round with such a tree is expected to emit, the one after it included.

    A node of sibling rank k is kept with `acceptance[k]` where its parent is; with 0 beyond.
    """
    return expected_by_depth(shape, [acceptance] * len(shape.levels))


def expected_by_depth(shape: TreeShape, acceptance: Sequence[Sequence[float]]) -> float:
    """The same where acceptance by rank is another one at each depth."""
    total, above = 1.0, [1.0]
    for level, by_rank in zip(shape.levels, acceptance, strict=False):
        ranks, chances = [0] * len(above), []
        for parent in level:
            rank = ranks[parent]
            ranks[parent] += 1
            chances.append(above[parent] * (by_rank[rank] if rank < len(by_rank) else 0.0))
        total, above = total + sum(chances), chances
    return total


def best(acceptance: Sequence[float], depth: int, nodes: int) -> TreeShape:
    """The tree of most expected tokens, of a number of nodes and a depth at most.

    Args:
        acceptance: by sibling rank; later ranks have none.
        depth: of the longest path.
        nodes: the most that it may have.
    """
    in_order = all(after <= before for before, after in pairwise(acceptance))
    return (likeliest if in_order else optimum)(acceptance, depth, nodes)


def likeliest(acceptance: Sequence[float], depth: int, nodes: int) -> TreeShape:
    """The tree of the nodes that are likeliest to be kept.

    A node of sibling rank k is kept with `acceptance[k]` where its parent is, so the expected
    number of kept tokens is the sum over nodes of the products on their paths. Where acceptance
    falls with the rank, the likeliest nodes form a tree, and no other tree of their number is
    expected to keep more (Sequoia's programme, arXiv 2402.12374, finds the same).

    Args:
        acceptance: by sibling rank, falling; later ranks have none.
        depth: of the longest path.
        nodes: the most that it may have.
    """
    return likeliest_by_depth([acceptance] * depth, nodes)


def likeliest_by_depth(acceptance: Sequence[Sequence[float]], nodes: int) -> TreeShape:
    """The same where acceptance by rank is another one at each depth (Medusa's tree search,
    arXiv 2401.10774, section 2.1.2, finds the same).

    Args:
        acceptance: by depth and sibling rank, falling with the rank; paths are at most as deep.
        nodes: the most that it may have.
    """
    # (chance that it is not kept ..., order, parent, rank, depth), the likeliest first.
    waiting = [(-acceptance[0][0], 0, -1, 0, 1)] if acceptance and acceptance[0] else []
    chosen: list[tuple[int, int]] = []
    order = 0
    while waiting and len(chosen) < nodes:
        negative, _, parent, rank, level = heapq.heappop(waiting)
        node = len(chosen)
        chosen.append((parent, level))
        here, below = acceptance[level - 1], acceptance[level] if level < len(acceptance) else ()
        of_parent = -negative / here[rank]
        for chance, place, next_rank, next_level in (
            (of_parent * here[rank + 1] if rank + 1 < len(here) else 0.0, parent, rank + 1, level),
            (-negative * below[0] if below else 0.0, node, 0, level + 1),
        ):
            if chance > 0:
                order += 1
                heapq.heappush(waiting, (-chance, order, place, next_rank, next_level))
    return _by_level(chosen)


def optimum(acceptance: Sequence[float], depth: int, nodes: int) -> TreeShape:
    """The same by Sequoia's dynamic programme (arXiv 2402.12374), for any acceptances.

    Where a later sibling is likelier than an earlier one, the likeliest nodes are no tree. Takes
    depth * ranks * nodes^2 steps.

    Args:
        acceptance: by sibling rank, in any order; later ranks have none.
        depth: of the longest path.
        nodes: the most that it may have.
    """
    ranks, most = len(acceptance), nodes + 1
    # Of a subtree of at most m nodes, its own root included, with the first b ranks below it.
    values = np.zeros((depth + 1, ranks + 1, most + 1))
    # How many of the m nodes are not below the last of those siblings.
    before = np.zeros((depth + 1, ranks + 1, most + 1), np.int64)
    values[:, 0, 1:] = 1
    for level in range(1, depth + 1):
        below = values[level - 1].max(0)
        for rank in range(1, ranks + 1):
            for m in range(2, most + 1):
                sums = values[level, rank - 1, 1:m] + acceptance[rank - 1] * below[m - 1 : 0 : -1]
                at = int(sums.argmax())
                values[level, rank, m], before[level, rank, m] = sums[at], at + 1
    chosen: list[tuple[int, int]] = []
    _retrace(values, before, chosen, depth, most, -1)
    return _by_level(chosen)


def _retrace(
    values: npt.NDArray[np.float64],
    before: npt.NDArray[np.int64],
    chosen: list[tuple[int, int]],
    left: int,
    size: int,
    parent: int,
) -> None:
    """Append the nodes below one of a tree, of `left` levels and at most `nodes` nodes with it."""
    depth = values.shape[0] - left
    # Of equal ones the fewest: nodes that are never kept cost rows.
    rank, sizes = int(values[left, :, size].argmax()), []
    while rank:
        kept = int(before[left, rank, size])
        sizes.append(size - kept)
        rank, size = rank - 1, kept
    for below in reversed(sizes):
        chosen.append((parent, depth))
        _retrace(values, before, chosen, left - 1, below, len(chosen) - 1)


def _by_level(chosen: Sequence[tuple[int, int]]) -> TreeShape:
    levels: list[tuple[int, ...]] = []
    number = {-1: 0}
    for level in range(1, max((depth for _, depth in chosen), default=0) + 1):
        nodes = [(number[parent], node) for node, (parent, at) in enumerate(chosen) if at == level]
        nodes.sort()
        number |= {node: place for place, (_, node) in enumerate(nodes)}
        levels.append(tuple(parent for parent, _ in nodes))
    return TreeShape(tuple(levels))

"""What a draft's size is worth: the tokens that a round is expected to yield, over its time.

The objective is goodput (SmartSpec, arXiv 2406.14066); the tokens of a tree are Sequoia's sum over
its nodes (arXiv 2402.12374).
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

from orchestrator.sizes.acceptance import PRIOR, Chances
from tandem.drafting.decoders.shape import likeliest
from tandem.speculation.tree import DraftSize, Tree

PLAIN = DraftSize(0)
# Goodput is known to a few percent: less than this is no reason for another size.
WORTH_IT = 1.03
# Between neighbours the best goodput differs by less than its measurement.
_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
_WIDTHS = (1, 2, 4)


def sizes(
    max_gamma: int, max_nodes: int, gamma: int | None, nodes: int | None
) -> tuple[DraftSize, ...]:
    """What there is to choose from, plain decoding first.

    Args:
        max_gamma: of the pair.
        max_nodes: of the pair; 0 where drafts are chains.
        gamma: that the request fixes; None leaves it open.
        nodes: that the request fixes; None leaves them open.
    """
    if gamma == 0:
        return (PLAIN,)
    found = [PLAIN] if gamma is None else []
    for length in _LENGTHS if gamma is None else (gamma,):
        if not max_nodes:
            counts = [0]
        elif nodes is not None:
            counts = [nodes]
        else:
            counts = [length * width for width in _WIDTHS if length * width <= max_nodes]
        most = max_nodes if max_nodes and nodes is None else nodes or max_gamma
        if gamma is not None or length <= min(max_gamma, most):
            found += [DraftSize(length, count) for count in counts or [max_nodes]]
    return tuple(found)


@lru_cache(maxsize=256)
def _nodes_of(size: DraftSize) -> tuple[tuple[int, int, int], ...]:
    """Of each node of the likeliest tree: its parent (0 the root), depth and rank; in order."""
    tree = Tree(likeliest(PRIOR, size.gamma, size.nodes).parents())
    return tuple(zip(tree.parents, tree.depths[1:], tree.ranks, strict=True))


def _times(one: float, other: float) -> float:
    return one * other


def expected_tokens(size: DraftSize, chances: Chances) -> float:
    """Of a round: the kept ones, and the one after them."""
    if not size.nodes:
        return 1.0 + sum(accumulate(chances.first[: size.gamma], _times))
    reached = [1.0]
    for parent, depth, rank in _nodes_of(size):
        reached.append(reached[parent] * chances.of(depth, rank))
    return sum(reached)

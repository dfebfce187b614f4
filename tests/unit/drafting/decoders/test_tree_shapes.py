"""Shapes of trees: how many tokens each is expected to keep, and that no shape keeps more."""

from __future__ import annotations

import random
from itertools import product

import pytest

from tandem.drafting.decoders.shape import TreeShape, best, expected_tokens, likeliest, optimum

ACCEPTANCE = (0.6, 0.2, 0.1)


def expected(acceptance: tuple[float, ...], levels: list[list[int]]) -> float:
    """Kept tokens of a shape, where sibling ranks are kept with these chances."""
    total, above = 0.0, [1.0]
    for level in levels:
        here = [above[p] * acceptance[level[:i].count(p)] for i, p in enumerate(level)]
        total, above = total + sum(here), here
    return total


def shapes(nodes: int, depth: int, widest: int) -> list[list[list[int]]]:
    """Every shape of so many nodes: trees as parents in level order."""
    found = []
    for parents in product(range(nodes), repeat=nodes - 1):
        tree = [-1, *(p - 1 for p in parents)] if nodes > 1 else [-1]
        if any(parent >= i for i, parent in enumerate(tree)) or tree != sorted(tree):
            continue
        levels: list[list[int]] = []
        place: list[tuple[int, int]] = []
        for parent in tree:
            level = place[parent][0] + 1 if parent >= 0 else 0
            while len(levels) <= level:
                levels.append([])
            levels[level].append(place[parent][1] if parent >= 0 else 0)
            place.append((level, len(levels[level]) - 1))
        counts = [row.count(p) for row in levels for p in set(row)]
        if len(levels) <= depth and max(counts) <= widest:
            found.append(levels)
    return found


@pytest.mark.parametrize("acceptance", [ACCEPTANCE, (0.74, 0.08, 0.035), (0.5, 0.49), (0.3,)])
@pytest.mark.parametrize(("nodes", "depth"), [(1, 3), (3, 2), (4, 4), (5, 2), (5, 3)])
def test_no_shape_is_expected_to_keep_more(
    acceptance: tuple[float, ...], nodes: int, depth: int
) -> None:
    shape = likeliest(acceptance, depth, nodes)
    own = expected(acceptance, [list(level) for level in shape.levels])
    most = max(
        (expected(acceptance, levels) for levels in shapes(nodes, depth, len(acceptance))),
        default=0.0,
    )
    assert len(shape) <= nodes
    assert len(shape.levels) <= depth
    assert own >= most - 1e-12
    assert expected_tokens(shape, acceptance) == pytest.approx(1 + own, abs=1e-12)


def test_one_sibling_makes_a_chain() -> None:
    assert likeliest((0.9,), 4, 16).levels == ((0,),) * 4


@pytest.mark.parametrize("first", range(0, 160, 40))
def test_the_programme_and_the_likeliest_nodes_agree_where_acceptance_falls(first: int) -> None:
    for seed in range(first, first + 40):
        draw = random.Random(seed)
        ranks = draw.randint(1, 6)
        acceptance = sorted((draw.random() ** 2 for _ in range(ranks)), reverse=True)
        depth, nodes = draw.randint(1, 8), draw.randint(1, 24)
        ours, theirs = likeliest(acceptance, depth, nodes), optimum(acceptance, depth, nodes)
        assert len(theirs) <= nodes
        assert len(theirs.levels) <= depth
        tokens = expected_tokens(ours, acceptance)
        assert expected_tokens(theirs, acceptance) == pytest.approx(tokens, abs=1e-12)
        assert best(acceptance, depth, nodes) == ours


@pytest.mark.parametrize("acceptance", [(0.2, 0.7), (0.1, 0.3, 0.5), (0.5, 0.0, 0.4), (0.0, 0.6)])
@pytest.mark.parametrize(("nodes", "depth"), [(1, 3), (3, 2), (4, 4), (5, 2), (5, 3)])
def test_the_programme_finds_the_best_where_it_does_not_fall(
    acceptance: tuple[float, ...], nodes: int, depth: int
) -> None:
    shape = best(acceptance, depth, nodes)
    most = max(
        expected(acceptance, levels)
        for count in range(1, nodes + 1)
        for levels in shapes(count, depth, len(acceptance))
    )
    assert len(shape) <= nodes
    assert expected_tokens(shape, acceptance) == pytest.approx(1 + most, abs=1e-12)


def test_a_node_that_is_never_kept_is_not_drawn() -> None:
    assert len(optimum((0.5, 0.0), 3, 9)) == len(likeliest((0.5, 0.0), 3, 9)) == 3
    assert len(optimum((0.0,), 3, 9)) == 0


def test_a_sibling_beyond_the_ranks_counts_for_nothing() -> None:
    assert expected_tokens(TreeShape(((0, 0), (0, 1))), (0.5,)) == 1.75


def test_a_node_hangs_at_its_parents_place() -> None:
    # Two below the root, one below the first of them, two below the second.
    shape = likeliest((0.6, 0.55), 2, 5)
    assert shape.levels == ((0, 0), (0, 0, 1))
    assert shape.parents() == [0, 0, 1, 1, 2]

"""What follows from where the nodes of a draft hang."""

from __future__ import annotations

import pytest

from tandem.speculation.tree import Tree

#        0
#      1   2
#    3     4 5
TREE = Tree([0, 0, 1, 2, 2])


def test_a_tree_says_who_hangs_where() -> None:
    assert TREE.children == [[1, 2], [3], [4, 5], [], [], []]
    assert [list(TREE.children_of(place)) for place in range(6)] == TREE.children
    assert [TREE.is_leaf(place) for place in range(6)] == [False, False, False, True, True, True]
    assert (TREE.depths, TREE.depth) == ([0, 1, 1, 2, 2, 2], 2)
    assert TREE.ranks == [0, 1, 0, 0, 1]


def test_a_path_has_places_ranks_and_first_children() -> None:
    assert list(TREE.path_to(5)) == [2, 5]
    assert TREE.ranks_to(5) == [(1, 1), (1, 1)]
    assert TREE.first_children(5) == [1, 4]
    assert TREE.first_children(1) == [1, 3]


def test_tokens_lead_to_places_and_twins_to_the_first_of_them() -> None:
    twins = Tree([0, 0, 0, 1])
    assert twins.homes([7, 8, 7, 9]) == [1, 2, 1, 4]
    assert twins.follow([7, 8, 7, 9], [7, 9, 5]) == [1, 4]
    assert twins.follow([7, 8, 7, 9], [9]) == []


@pytest.mark.parametrize("count", [0, 1, 4])
def test_a_chain_is_a_tree_without_branches(count: int) -> None:
    chain, same = Tree.of(None, count), Tree(list(range(count)))
    assert (chain.depth, chain.depths, chain.ranks) == (same.depth, same.depths, same.ranks)
    assert chain.children == same.children
    for place in range(count + 1):
        assert list(chain.path_to(place)) == same.path_to(place)
        assert list(chain.children_of(place)) == same.children_of(place)
        assert chain.ranks_to(place) == same.ranks_to(place)
        assert chain.first_children(place) == same.first_children(place)
    assert list(chain.homes([3] * count)) == list(same.homes([3] * count))

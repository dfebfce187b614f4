"""How the orchestrator reads a drafter's answer: paths, siblings, which path is reported first."""

from __future__ import annotations

from tandem.peers.text.contracts import DraftReply
from tandem.telemetry.stages import StageTimes


def answer(token_ids: list[int], parents: list[int] | None) -> DraftReply:
    return DraftReply(token_ids, parents, None, 0, StageTimes())


def test_of_a_tree_the_kept_path_comes_first() -> None:
    # 5 and 6 at the root, 7 after 5, 8 and 9 after 6.
    tree = answer([5, 6, 7, 8, 9], [0, 0, 1, 2, 2])
    assert tree.gamma == 2
    assert tree.kept_first(5) == [6, 9, 5, 7, 8]
    assert tree.kept_first(1) == [5, 6, 7, 8, 9]
    assert tree.kept_first(0) == [5, 6, 7, 8, 9]
    assert tree.path_to(5) == [6, 9]
    assert tree.tree.ranks_to(5) == [(1, 1), (1, 1)]


def test_a_chain_stays_as_it_is() -> None:
    assert answer([5, 6, 7], None).kept_first(2) == [5, 6, 7]


def test_behind_a_leaf_of_any_depth_comes_a_bonus() -> None:
    tree = answer([5, 6, 7], [0, 0, 1])
    assert [tree.tree.is_leaf(place) for place in range(4)] == [False, False, True, True]
    chain = answer([5, 6, 7], None)
    assert [chain.tree.is_leaf(place) for place in range(4)] == [False, False, False, True]
    assert answer([], []).tree.is_leaf(0)

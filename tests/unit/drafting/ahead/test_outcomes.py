"""Which outcomes drafts are prepared after."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tandem.drafting.ahead.outcomes import likeliest_outcomes
from tandem.speculation.draft import Draft

HALF, TENTH = math.log(0.5), math.log(0.1)


def test_a_chain_ends_at_each_place_with_what_it_did_not_draft() -> None:
    draft = Draft.certain([3, 4])
    following = [[(3, HALF), (5, TENTH)], [(4, HALF), (6, TENTH)], [(7, HALF), (8, TENTH)]]
    found = likeliest_outcomes(draft, following, (0.8,), 9)
    chances = {one.token_ids: one.chance for one in found}
    assert chances == {
        (3, 4, 7): pytest.approx(0.64 * 0.5),
        (3, 4, 8): pytest.approx(0.64 * 0.1),
        (3, 6): pytest.approx(0.8 * 0.2 * 0.1 / 0.5),
        (5,): pytest.approx(0.2 * 0.1 / 0.5),
    }
    assert [one.chance for one in found] == sorted(chances.values(), reverse=True)
    assert likeliest_outcomes(draft, following, (0.8,), 2) == found[:2]


def test_a_tree_ends_where_none_of_several_children_is_kept() -> None:
    draft = replace(Draft.certain([3, 4, 5]), parents=[0, 0, 1])
    rows = [[(3, HALF), (4, TENTH), (6, TENTH)], [(7, HALF)], [(8, HALF)], [(9, HALF)]]
    found = {one.token_ids: one for one in likeliest_outcomes(draft, rows, (0.7, 0.1), 9)}
    assert found.keys() == {(6,), (3, 7), (4, 8), (3, 5, 9)}
    assert found[4, 8].chance == pytest.approx(0.1 * 0.5)
    assert found[6,].chance == pytest.approx(0.2 * 0.1 / 0.4)
    assert found[3, 7].chance == pytest.approx(0.7 * 0.3 * 0.5)
    assert found[3, 5, 9].chance > found[4, 8].chance


def test_a_twin_is_no_place_of_its_own() -> None:
    draft = replace(Draft.certain([5, 5, 7]), parents=[0, 0, 1])
    rows = [[(6, HALF)], [(7, HALF), (8, TENTH)], [(7, HALF), (8, TENTH)], [(9, HALF)]]
    found = likeliest_outcomes(draft, rows, (0.6, 0.2), 9)
    chances = {one.token_ids: one.chance for one in found}
    assert len(found) == len(chances)
    assert chances == {
        (6,): pytest.approx(0.2 * 0.5),
        (5, 8): pytest.approx(0.8 * 0.4 * 0.1 / 0.5),
        (5, 7, 9): pytest.approx(0.8 * 0.6 * 0.5),
    }


def test_nothing_follows_that_cannot_come() -> None:
    following = [[(1, -math.inf), (2, 0.0)]]
    (only,) = likeliest_outcomes(Draft.certain(()), following, (0.7,), 9)
    assert (only.token_ids, only.chance) == ((2,), 1.0)

"""Which sibling ranks a text has accepted: counted at the positions of kept paths only."""

from __future__ import annotations

import numpy as np
import pytest

from tandem.drafting.decoders.ranks import Ranks
from tandem.speculation.draft import Draft

BEFOREHAND = (0.7, 0.1, 0.05)


def tree(tokens: list[int], parents: list[int]) -> Draft:
    none = np.zeros(0, np.uint32)
    return Draft(tokens, [0] * len(tokens), none, none.astype(np.uint16), parents)


def test_nothing_seen_is_what_was_expected() -> None:
    assert Ranks(BEFOREHAND).acceptance == BEFOREHAND


def test_places_off_the_path_do_not_count() -> None:
    ranks = Ranks(BEFOREHAND)
    # Two at the root, two after the first, one after the second.
    draft = tree([5, 6, 7, 8, 9], [0, 0, 1, 1, 2])
    ranks.see(draft, [6])
    assert (ranks.drawn, ranks.kept) == ([2, 1, 0], [0, 1, 0])
    ranks.see(draft, [5, 8])
    assert (ranks.drawn, ranks.kept) == ([4, 3, 0], [1, 2, 0])
    ranks.see(draft, [])
    assert (ranks.drawn, ranks.kept) == ([5, 4, 0], [1, 2, 0])


def test_a_twin_is_not_what_was_kept() -> None:
    ranks = Ranks(BEFOREHAND)
    ranks.see(tree([5, 5, 6], [0, 0, 1]), [5, 6])
    assert (ranks.drawn, ranks.kept) == ([2, 1, 0], [2, 0, 0])


def test_what_is_seen_often_outweighs_it_and_falls_with_the_rank() -> None:
    ranks = Ranks(BEFOREHAND)
    for _ in range(500):
        ranks.see(tree([5, 6], [0, 0]), [6])
    first, second, third = ranks.acceptance
    assert first == second == pytest.approx(0.04, abs=0.021)
    assert third <= second
    for _ in range(5000):
        ranks.see(tree([5, 6], [0, 0]), [5])
    assert ranks.acceptance[0] == pytest.approx(0.91, abs=0.03)
    assert all(share > 0 for share in ranks.acceptance)

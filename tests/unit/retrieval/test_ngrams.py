"""A pool of n-grams: what is found, and what is forgotten."""

from __future__ import annotations

from tandem.retrieval.ngrams import NgramPool


def lists(found: object) -> list[list[list[int]]]:
    return [rows.tolist() for rows in found]  # type: ignore[attr-defined]


def test_the_last_that_came_comes_first() -> None:
    pool = NgramPool(3, 2, 10)
    pool.add_text([1, 2, 3, 1, 4, 5, 1, 6, 7], 0)
    assert lists(pool.behind(1, 2)) == [[[6, 7], [4, 5]]]  # of the three first ones two are kept
    assert lists(pool.behind(1, 1, 1)) == [[[6]]]
    assert pool.behind(9, 2) == []
    pool.add((1, 4, 5))
    assert lists(pool.behind(1, 2)) == [[[4, 5], [6, 7]]]


def test_the_longest_match_comes_first() -> None:
    pool = NgramPool(4, 8, 100)
    pool.add_text([1, 2, 3, 4, 9, 2, 3, 5, 6], 0)
    found = lists(pool.continuations([1, 2, 3], 2))
    assert found == [[[4]], [[5, 6], [4, 9]], [[4, 9]]]
    assert lists(pool.continuations([7], 2)) == []
    assert lists(pool.continuations([2], 1)) == [[[3], [3]]]


def test_what_was_used_least_lately_is_forgotten() -> None:
    pool = NgramPool(2, 4, 3)
    for first in (1, 2, 3):
        pool.add((first, 0))
    pool.behind(1, 1)
    list(pool.continuations([2], 1))
    pool.add((4, 0))
    assert pool.count == 3
    assert not pool.behind(3, 1)
    assert all(pool.behind(first, 1) for first in (1, 2, 4))

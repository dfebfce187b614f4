"""A merged tree has the most frequent beginnings, parents first, within its bounds."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from tandem.retrieval.merged import MergedTree
from tandem.retrieval.store import Continuations


def paths_of(tree: MergedTree) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for token_id, parent in zip(tree.token_ids, tree.parents, strict=True):
        paths.append((*paths[parent], token_id))
    return paths[1:]


@pytest.mark.parametrize("seed", range(20))
def test_it_has_the_most_frequent_beginnings(seed: int) -> None:
    rng = random.Random(seed)
    rows = [[rng.randrange(3) for _ in range(4)] for _ in range(rng.randint(1, 30))]
    for row in rows:
        end = rng.randint(1, 4)
        row[end:] = [-1] * (4 - end)
    counts = Counter(tuple(row[:n]) for row in rows for n in range(1, 5) if min(row[:n]) >= 0)
    most = rng.randint(1, 20)
    tree = MergedTree(most, 9)
    tree.fill([np.array(rows)])
    paths = paths_of(tree)
    assert len(paths) == min(most, len(counts)) == len(set(paths))
    kept = sorted((counts[path] for path in paths), reverse=True)
    assert kept == sorted(counts.values(), reverse=True)[: len(paths)]
    assert [counts[path] for path in paths] == kept, "the most frequent come first"


def test_later_matches_fill_what_is_left() -> None:
    tree = MergedTree(5, 10)
    asked = []

    def matches() -> Iterator[Continuations]:
        for rows in ([[1, 2]], [[1, 3], [1, 3], [4, 5]], [[6, 7]], [[8, 9]]):
            asked.append(rows)
            yield np.array(rows)

    tree.fill(matches())
    # The first match whole, then what is new of the second, then the third while there is room.
    assert paths_of(tree) == [(1,), (1, 2), (1, 3), (4,), (4, 5)]
    assert len(asked) == 3, "a full tree asks for no more"
    assert tree.full


def test_nothing_found_is_an_empty_tree() -> None:
    tree = MergedTree(5, 10)
    tree.fill([])
    assert (tree.token_ids, tree.parents, tree.full) == ([], [], False)


def test_a_continuation_ends_before_an_id_that_there_is_not() -> None:
    tree = MergedTree(5, 4)
    tree.fill([np.array([[1, 4, 2], [3, 2, 9]])])
    assert paths_of(tree) == [(1,), (3,), (3, 2)]

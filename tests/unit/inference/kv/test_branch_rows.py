"""The KV rows of a sequence's branches: where they are written and seen, and how a path is kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tandem.inference.batch.packed import Packing
from tandem.inference.batch.segment import Segment
from tandem.inference.feed import Feed
from tandem.inference.kv.branches import NO_BRANCHES, Branches
from tandem.inference.kv.extents import SequenceCache
from tandem.inference.kv.pool import KVPool
from tests.support.decoders import decoder_over
from tests.support.models.architectures import LLAMA, build


def test_rows_are_numbered_since_the_trunk_last_grew() -> None:
    cache = SequenceCache(KVPool(64), 8, 32, length=5)

    def held() -> list[Any]:
        return [cache.length, cache.branches.parents, cache.branches.depths, cache.branch_tokens]

    cache.grow([1, 2, 3], (0, 0, 1))
    cache.grow([4], (3,))
    assert held() == [5, (0, 0, 1, 3), (1, 1, 2, 3), (1, 2, 3, 4)]
    cache.grow([7, 8, 9], (0, 0))
    assert held() == [6, (0, 0), (1, 1), (8, 9)]
    cache.grow([1])
    assert held() == [7, (), (), ()]
    cache.grow([1, 1], (0, 0))
    cache.rollback(9)
    assert held() == [7, (), (), ()]


def test_positions_are_depths_and_places_are_in_the_order_of_feeds() -> None:
    cache = SequenceCache(KVPool(64), 8, 32, length=5)
    cache.grow([1, 2, 3], (0, 0, 1))
    packing = Packing.of([Feed(cache, [4, 5], 1, (3, 0))])
    assert packing.positions == [7, 5]
    assert packing.slots == [16, 17]
    (segment,) = packing.segments
    assert (segment.count, segment.length, segment.reach) == (2, 10, 8)
    positions, sees = segment.behind
    assert positions.tolist() == [5, 5, 6, 7, 5]
    assert sees.astype(int).tolist() == [[1, 0, 1, 1, 0], [0, 0, 0, 0, 1]]
    with_trunk = Packing.of([Feed(cache, [4, 5, 6], 1, (0, 0))])
    assert (with_trunk.positions, with_trunk.slots) == ([5, 6, 6], [13, 14, 15])
    assert with_trunk.segments[0].behind[1].astype(int).tolist() == [
        [1, 0, 0],
        [1, 1, 0],
        [1, 0, 1],
    ]


def test_a_chain_with_parents_is_a_chain() -> None:
    cache = SequenceCache(KVPool(64), 0, 32, length=5)
    plain = Packing.of([Feed(cache, [1, 2, 3], 3)])
    assert Packing.of([Feed(cache, [1, 2, 3], 3, (0, 1))]) == plain
    cache.grow([1, 2], (0,))
    later = Packing.of([Feed(cache, [3], 1, (1,))])
    assert later.segments == [Segment(0, 1, 0, 8)]
    assert (later.positions, later.slots) == ([7], [7])


@pytest.mark.parametrize(
    ("token_ids", "parents"), [([1], (3,)), ([1], (-1,)), ([1, 1], (2, 4)), ([1], (0, 0))]
)
def test_a_parent_that_is_no_earlier_row_is_refused(
    token_ids: list[int], parents: tuple[int, ...]
) -> None:
    cache = SequenceCache(KVPool(64), 0, 32, length=5)
    cache.grow([1, 2], (0, 0))
    with pytest.raises(ValueError, match="parent"):
        Packing.of([Feed(cache, token_ids, 0, parents)])


def test_branches_do_not_leave_their_extent() -> None:
    cache = SequenceCache(KVPool(64), 0, 8, length=5)
    cache.grow([1, 2], (0, 0))
    Packing.of([Feed(cache, [1], 0, (0,))])
    with pytest.raises(ValueError, match="9 tokens do not fit an extent of 8"):
        Packing.of([Feed(cache, [1, 2], 0, (0, 0))])


@pytest.mark.parametrize("path", [(3,), (1, 2), (0,), (5,), (2, 4, 3), (-1,), (1, 3, 3)])
def test_what_is_no_path_is_not_kept(path: tuple[int, ...]) -> None:
    cache = SequenceCache(KVPool(64), 0, 32, length=5, branches=Branches().grown((0, 0, 1, 2)))
    with pytest.raises(ValueError, match="is no child of row"):
        cache.keep(path)
    assert (cache.length, len(cache.branches)) == (5, 4)


@pytest.mark.parametrize(
    ("path", "moved"),
    [
        ((), None),
        ((1,), None),
        ((1, 3), ([1], [11, 13], 12)),
        ((2, 4, 5, 6), ([], [12, 14, 15, 16], 11)),
    ],
)
def test_at_most_the_kept_path_is_copied(path: tuple[int, ...], moved: Any) -> None:
    """And it may land where some of it was."""
    pool = KVPool(40)
    for layer in range(2):
        pool.slots = torch.arange(40)
        states = torch.arange(40.0)[None, :, None] + 100 * layer
        pool.write(layer, states.repeat(2, 1, 3), -states.repeat(2, 1, 4))
    before = [states.clone() for states in (*pool.keys, *pool.values)]
    cache = SequenceCache(pool, 4, 20, length=7)
    cache.grow([0] * 6, (0, 0, 1, 2, 4, 5))
    cache.keep(path)
    assert (cache.length, cache.branches) == (7 + len(path), NO_BRANCHES)
    expected = list(range(40))
    for i, row in enumerate(path):
        expected[11 + i] = 10 + row
    for old, new in zip(before, (*pool.keys, *pool.values), strict=True):
        assert torch.equal(new[:, :40], old[:, expected])
    if moved is None:
        assert expected == list(range(40))


def test_rows_that_are_in_place_are_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[Any] = []
    monkeypatch.setattr(KVPool, "move", lambda _, places, to: moves.append((places, to[0])))
    for path in ((), (1,), (1, 2), (1, 3, 4), (5,)):
        cache = SequenceCache(KVPool(64), 4, 32, length=7)
        cache.grow([0] * 5, (0, 1, 1, 3, 0))
        cache.keep(path)
    assert moves == [([13, 14], 12), ([15], 11)]


def test_blocks_are_moved_as_well() -> None:
    pytest.importorskip("openvino")
    pool: Any = decoder_over(build(LLAMA), "tiny", cache_tokens=96, engine="openvino").pool
    for raw in pool._raw:
        raw[:] = np.arange(96).reshape(3, 1, 32, 1)
    cache = SequenceCache(pool, 0, 96, length=60)
    cache.grow([0] * 10, (0, 0, 2, 3, 4, 5, 6, 7, 8, 9))
    cache.keep((2, 3, 4, 5, 6, 7, 8, 9, 10))
    for tensor in pool.tensors:
        flat = tensor.data.swapaxes(1, 2).reshape(96, -1)
        expected = [*range(60), *range(61, 70), *range(69, 96)]
        assert (flat == np.array(expected)[:, None]).all()


def test_rows_behind_a_kept_path_stay_branch_rows() -> None:
    pool = KVPool(40)
    for layer in range(2):
        pool.slots = torch.arange(40)
        states = torch.arange(40.0)[None, :, None] + 100 * layer
        pool.write(layer, states.repeat(2, 1, 3), -states.repeat(2, 1, 4))
    cache = SequenceCache(pool, 4, 20, length=7)
    cache.grow([1, 2, 3, 4, 5, 6], (0, 0, 2, 1, 3, 3))
    before = [states.clone() for states in (*pool.keys, *pool.values)]
    cache.keep((2, 3), (5, 6))
    assert (cache.length, cache.branches.parents, cache.branch_tokens) == (9, (0, 0), (5, 6))
    expected = list(range(40))
    expected[11:15] = [12, 13, 15, 16]
    for old, new in zip(before, (*pool.keys, *pool.values), strict=True):
        assert torch.equal(new[:, :40], old[:, expected])
    with pytest.raises(ValueError, match="row 2 does not hang at the path"):
        SequenceCache(pool, 4, 20, 7, Branches().grown((0, 0))).keep((1,), (2,))


def test_what_was_fed_since_a_mark_is_forgotten() -> None:
    cache = SequenceCache(KVPool(64), 0, 32, length=8)
    cache.grow([1, 2], (0, 1))
    mark = cache.mark()
    cache.reopen(5, [7, 8, 9])
    assert (cache.length, cache.branches.parents) == (5, (0, 1, 2, 3, 4))
    assert cache.branch_tokens == (7, 8, 9, 1, 2)
    assert cache.branches.in_line
    cache.grow([3, 4], (0, 5))
    assert len(cache.branches) == 7
    cache.return_to(mark)
    assert cache.mark() == mark
    assert (mark.length, mark.branches.parents, mark.branch_tokens) == (8, (0, 1), (1, 2))

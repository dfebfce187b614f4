"""Attention of many texts in one call, compared with one call a text.

A device's kernel reads the same tiles (`tests/unit/kernels`). Here the operator's form
for a CPU reads them, and only the slots that they name: all others hold NaN.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tandem.inference.batch import attention
from tandem.inference.batch.attention import attend
from tandem.inference.batch.packed import PackedBatch
from tandem.inference.batch.segment import Segment
from tandem.inference.batch.tiles import FEW, MANY, ONE, Tiles, TileSizes
from tandem.inference.feed import Feed
from tandem.inference.kv.branches import Branches
from tandem.inference.kv.pool import KVPool
from tests.support.devices.forest import HEADS, empty_pool, fill, forest

CPU = torch.device("cpu")
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"scaling": 0.7},
    "window": {"window": 5},
    "own position alone": {"window": 1},
    "soft cap": {"softcap": 0.5, "window": 7},
}


def both(feeds: list[Feed]) -> tuple[PackedBatch, PackedBatch]:
    """For one call, and for one call a sequence."""
    return PackedBatch.of(feeds, CPU, in_one_call=True), PackedBatch.of(feeds, CPU)


def drawn(seed: int, most: int, trees: bool = True) -> tuple[KVPool, list[Feed]]:
    pool = empty_pool(1500)
    return pool, forest(random.Random(seed), most, pool, trees=trees)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most", [ONE, FEW, MANY, 2 * MANY])
def test_one_call_sees_what_the_calls_one_by_one_see(kind: str, most: int) -> None:
    torch.manual_seed(1)
    for seed in range(6):
        pool, feeds = drawn(seed, most, trees=seed % 3 > 0)
        tiled, looped = both(feeds)
        states = fill(pool, tiled.segments)
        expected = attend(looped, *states, **KINDS[kind])
        found = attend(tiled, *states, **KINDS[kind])
        assert found.shape == expected.shape == (states[0].shape[1], HEADS[0], HEADS[3])
        assert (found - expected).abs().max() < 1e-5
        assert tiled.tiles is not None
        assert not tiled.tiles.counts.any()


def test_a_text_with_more_rows_behind_its_trunk_than_bits_of_a_word() -> None:
    pool = empty_pool(300)
    cache = pool.reserve(200)
    assert cache is not None
    cache.length = 20
    parents = [max(0, i - 1 - i % 3) for i in range(90)]
    tiled, looped = both([Feed(cache, [1] * 92, 0, parents)])
    assert tiled.tiles is not None
    assert tiled.tiles.words == 3
    states = fill(pool, tiled.segments)
    for window in (None, 9):
        expected = attend(looped, *states, window=window)
        assert (attend(tiled, *states, window=window) - expected).abs().max() < 1e-5


def test_in_bfloat16_it_differs_by_rounding_alone() -> None:
    torch.manual_seed(2)
    pool, feeds = drawn(2, FEW)
    tiled, looped = both(feeds)
    query, keys, values = (part.nan_to_num(1.0).bfloat16() for part in fill(pool, tiled.segments))
    exact = attend(looped, query.float(), keys.float(), values.float())
    found = [attend(one, query, keys, values).float() for one in (tiled, looped)]
    errors = [(one - exact).abs().mean() for one in found]
    assert 0 < errors[0] < 2 * errors[1]


def test_layers_share_what_is_seen_and_each_window_has_its_own() -> None:
    tiles = both(drawn(3, FEW)[1])[0].tiles
    assert tiles is not None
    seen = [tiles.seen(window)[0].data_ptr() for window in (None, 5, None, 5)]
    assert seen[0] == seen[2] != seen[1] == seen[3]


def test_padded_tiles_take_batch_after_batch_in_the_same_memory() -> None:
    torch.manual_seed(5)
    room = TileSizes(rows=200, tiles=40, size=FEW, words=4)
    tiles = Tiles([Segment(0, 1, 0, 1)], CPU, room, (None, 5))
    with pytest.raises(ValueError, match="window of 7"):
        tiles.seen(7)
    pointers = [tiles.seen(window)[0].data_ptr() for window in (None, 5)]
    for seed in range(5):
        pool, feeds = drawn(seed, FEW)
        tiled, looped = both(feeds)
        tiles.refill(tiled.segments)
        assert [tiles.seen(window)[0].data_ptr() for window in (None, 5)] == pointers
        query, keys, values = fill(pool, tiled.segments)
        spare = torch.full((HEADS[0], room.rows - query.shape[1], HEADS[2]), torch.nan)
        tiled.tiles = tiles
        for window in (None, 5):
            found = attend(tiled, torch.cat((query, spare), 1), keys, values, window=window)
            expected = attend(looped, query, keys, values, window=window)
            assert (found[: len(expected)] - expected).abs().max() < 1e-5


# Mutants: what a tile gets wrong, seen by the comparison with the calls one by one.


def changed(change: Callable[[Segment], Segment]) -> Callable[[PackedBatch], None]:
    def mutant(batch: PackedBatch) -> None:
        batch.tiles = Tiles([change(segment) for segment in batch.segments], CPU)

    return mutant


def siblings_seen(segment: Segment) -> Segment:
    if segment.branches is None:
        return segment
    line = Branches().grown(range(len(segment.branches)))
    return replace(segment, branches=Branches(line.parents, segment.branches.depths))


def deeper(segment: Segment) -> Segment:
    if segment.branches is None:
        return segment
    depths = tuple(depth + 1 for depth in segment.branches.depths)
    return replace(segment, branches=Branches(segment.branches.parents, depths))


def a_wider_window(batch: PackedBatch) -> None:
    right = batch.tiles
    assert right is not None
    seen = right.seen
    right.seen = lambda window: seen(window and window + 1)  # type: ignore[method-assign]


def looked(change: Callable[[np.ndarray, np.ndarray], None]) -> Callable[[PackedBatch], None]:
    """`change` gets the numbers of the tiles, and the words of bits."""

    def mutant(batch: PackedBatch) -> None:
        assert batch.tiles is not None
        tiles, look, rows = batch.tiles, batch.tiles._look, batch.token_ids.shape[1]

        def wrong(window: int | None) -> np.ndarray:
            flat = look(window)
            end = 6 * len(tiles.counts)
            change(flat[:end].reshape(6, -1), flat[end + 2 * rows :])
            return flat

        batch.tiles._look = wrong  # type: ignore[method-assign]

    return mutant


def a_slot_too_few(tiles: np.ndarray, words: np.ndarray) -> None:
    tiles[3] -= 1


def the_first_slot_left_out(tiles: np.ndarray, words: np.ndarray) -> None:
    tiles[2] += 1


def another_texts_rows(tiles: np.ndarray, words: np.ndarray) -> None:
    tiles[0, 1:] -= 1


def bits_ignored(tiles: np.ndarray, words: np.ndarray) -> None:
    words[:] = 0


MUTANTS: dict[str, Callable[[PackedBatch], None]] = {
    "a wider window": a_wider_window,
    "a slot too few": looked(a_slot_too_few),
    "the first slot left out": looked(the_first_slot_left_out),
    "bits ignored": looked(bits_ignored),
    "siblings seen": changed(siblings_seen),
    "a position off": changed(deeper),
    "the next position": changed(lambda s: replace(s, length=s.length + 1)),
    "another extent": changed(lambda s: replace(s, start=s.start + 16)),
    "another text's rows": looked(another_texts_rows),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_of_tiles_are_caught(mutant: str) -> None:
    torch.manual_seed(4)
    pool, feeds = drawn(4, FEW)
    tiled, looped = both(feeds)
    assert {segment.branches is None for segment in tiled.segments} == {False, True}
    query, keys, values = (part.nan_to_num(7.0) for part in fill(pool, tiled.segments))
    expected = attend(looped, query, keys, values, window=5)
    assert (attend(tiled, query, keys, values, window=5) - expected).abs().max() < 1e-5
    again, _ = both(feeds)
    MUTANTS[mutant](again)
    assert not (attend(again, query, keys, values, window=5) - expected).abs().max() < 1e-2


def test_a_kernel_may_lay_its_result_out_by_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of CUDA do in float32, for heads that share a key head."""

    def by_tokens(*args: Any, **options: Any) -> torch.Tensor:
        found = scaled_dot_product_attention(*args, **options)
        return found.transpose(1, 2).contiguous().transpose(1, 2)

    torch.manual_seed(3)
    pool, feeds = drawn(1, FEW)
    _, batch = both(feeds)
    states = fill(pool, batch.segments)
    expected = attend(batch, *states)
    monkeypatch.setattr(attention, "scaled_dot_product_attention", by_tokens)
    assert torch.equal(attend(batch, *states), expected)

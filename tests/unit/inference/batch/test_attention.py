"""Attention of many sequences in one call, compared with one call per sequence, on the CPU.

A GPU's kernel is compiled from the same mask. Here the mask, the table of blocks and the rows
around them are tested with uncompiled flex attention and with a kernel in Python that reads as a
device's does: only whole blocks of the table, with masked positions multiplied by zero.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import scaled_dot_product_attention

from tandem.inference.batch import attention, flex
from tandem.inference.batch.attention import attend
from tandem.inference.batch.packed import PackedBatch
from tandem.inference.batch.segment import Segment
from tandem.inference.batch.tiles import FEW, MANY, Tiles
from tandem.inference.feed import Feed
from tandem.inference.kv.extents import SequenceCache
from tandem.inference.kv.pool import KVPool
from tests.support.devices.flex import BLOCK, as_a_device_reads
from tests.support.devices.states import GROUPS, HEADS, VALUE_DIM, empty_pool, states_of

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("small_blocks")


def scattered(rng: random.Random, most: int) -> tuple[KVPool, list[SequenceCache]]:
    """Texts of different lengths, not in the order of their extents, beside others' NaN."""
    pool = empty_pool(40)
    held = [pool.reserve(rng.randint(1, 5 * BLOCK)) for _ in range(12)]
    caches = [cache for cache in held if cache is not None]
    pool.slots = torch.arange(pool.positions)
    chosen = rng.sample(caches, rng.randint(2, most))
    for cache in chosen:
        pool.clear(cache)
        cache.length = rng.randint(0, cache.capacity - 1)
    return pool, chosen


def batch_of(
    rng: random.Random, caches: Sequence[SequenceCache], most: int = FEW
) -> tuple[PackedBatch, PackedBatch]:
    """The same new tokens for one call and for one call a sequence."""
    feeds = [
        Feed(cache, [1] * rng.randint(1, min(most, cache.capacity - cache.length)), 0)
        for cache in caches
    ]
    return PackedBatch.of(feeds, CPU, in_one_call=True), PackedBatch.of(feeds, CPU)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"scaling": 0.7},
    "window": {"window": 5},
    "window over a block": {"window": BLOCK + 1},
    "own position alone": {"window": 1},
    "soft cap": {"softcap": 0.5, "window": 7},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most", [1, FEW, MANY])
def test_one_call_sees_what_the_calls_one_by_one_see(
    kind: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    for seed in range(4):
        rng = random.Random(seed)
        pool, caches = scattered(rng, 9)
        tiled, looped = batch_of(rng, caches, most)
        query, keys, values = states_of(pool, tiled)
        expected = attend(looped, query, keys, values, **KINDS[kind])
        with monkeypatch.context() as patch:
            patch.setattr(flex, "flex_attention", as_a_device_reads)
            found = attend(tiled, query, keys, values, **KINDS[kind])
        assert found.shape == expected.shape == (query.shape[1], HEADS * GROUPS, VALUE_DIM)
        assert (found - expected).abs().max() < 1e-5
        # Flex attention uncompiled reads all there is.
        stale = [torch.where(states.isnan(), 50.0, states) for states in (keys, values)]
        found = attend(tiled, query, stale[0], stale[1], **KINDS[kind])
        assert (found - expected).abs().max() < 1e-5


def test_in_bfloat16_it_differs_by_rounding_alone() -> None:
    torch.manual_seed(2)
    rng = random.Random(2)
    pool, caches = scattered(rng, 9)
    tiled, looped = batch_of(rng, caches)
    query, keys, values = (part.nan_to_num(1.0).bfloat16() for part in states_of(pool, tiled))
    exact = attend(looped, query.float(), keys.float(), values.float())
    found = [attend(batch, query, keys, values) for batch in (tiled, looped)]
    errors = [(rounded.float() - exact).abs().mean() for rounded in found]
    assert 0 < errors[0] < 2 * errors[1]


@pytest.mark.parametrize("window", [None, 1, 5, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("most", [1, FEW, MANY])
def test_the_table_has_the_blocks_that_are_needed_and_no_others(
    window: int | None, most: int
) -> None:
    for seed in range(5):
        rng = random.Random(seed)
        pool, caches = scattered(rng, 9)
        batch, _ = batch_of(rng, caches, most)
        assert batch.tiles is not None
        fed = max(segment.count for segment in batch.segments)
        assert batch.tiles.size == (FEW if fed <= FEW else MANY)
        mask = batch.tiles.mask(window, pool.positions)
        sizes = (len(batch.tiles.rows), pool.positions)
        assert mask.seq_lengths == sizes
        asked = create_block_mask(mask.mask_mod, None, None, *sizes, CPU, mask.BLOCK_SIZE)
        expected = asked.to_dense()[0, 0].bool()
        for needed, count, found in zip(
            expected, mask.kv_num_blocks[0, 0], mask.kv_indices[0, 0], strict=True
        ):
            assert found[: int(count)].tolist() == needed.nonzero().flatten().tolist()
            assert 0 <= int(found.min()) <= int(found.max()) < len(needed)


def test_layers_share_masks_and_each_window_has_its_own() -> None:
    pool, caches = scattered(random.Random(3), 9)
    batch, _ = batch_of(random.Random(3), caches)
    assert batch.tiles is not None
    masks = [batch.tiles.mask(window, pool.positions) for window in (None, 5, None, 5)]
    assert masks[0] is masks[2] is not masks[1] is masks[3]


# Mutants: what a mask gets wrong, seen by the comparison with the calls one by one.


def a_wider_window(batch: PackedBatch) -> None:
    right = batch.tiles
    assert right is not None
    mask = right.mask
    right.mask = lambda window, positions: mask(window and window + 1, positions)  # type: ignore


def changed(change: Callable[[Segment], Segment]) -> Callable[[PackedBatch], None]:
    def mutant(batch: PackedBatch) -> None:
        batch.tiles = Tiles([change(segment) for segment in batch.segments], CPU)

    return mutant


def a_block_too_few(batch: PackedBatch) -> None:
    right = batch.tiles
    assert right is not None
    right.mask(None, 40 * BLOCK).kv_num_blocks.sub_(1).clamp_(min=1)


MUTANTS = {
    "a wider window": a_wider_window,
    "a block too few": a_block_too_few,
    "the neighbour's last": changed(lambda s: replace(s, start=s.start - 1, length=s.length + 1)),
    "the next position": changed(lambda s: replace(s, length=s.length + 1)),
    "another extent": changed(lambda s: replace(s, start=s.start + BLOCK)),
    "another text's rows": changed(lambda s: replace(s, first=max(0, s.first - 1))),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_of_the_mask_are_caught(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(4)
    monkeypatch.setattr(flex, "flex_attention", as_a_device_reads)
    rng = random.Random(4)
    pool, caches = scattered(rng, 9)
    for cache in caches:  # so that the window hides something of each
        cache.length = min(cache.length + 8, cache.capacity - 1)
    tiled, looped = batch_of(rng, caches)
    query, keys, values = (part.nan_to_num(7.0) for part in states_of(pool, tiled))
    window = None if mutant in ("the neighbour's last", "a block too few") else 5
    expected = attend(looped, query, keys, values, window=window)
    assert (attend(tiled, query, keys, values, window=window) - expected).abs().max() < 1e-5
    MUTANTS[mutant](tiled)
    assert (attend(tiled, query, keys, values, window=window) - expected).abs().max() > 1e-2


def test_a_kernel_may_lay_its_result_out_by_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of CUDA do in float32, for heads that share a key head."""

    def by_tokens(*args: Any, **options: Any) -> torch.Tensor:
        found = scaled_dot_product_attention(*args, **options)
        return found.transpose(1, 2).contiguous().transpose(1, 2)

    torch.manual_seed(3)
    rng = random.Random(1)
    pool, caches = scattered(rng, 3)
    _, batch = batch_of(rng, caches)
    states = states_of(pool, batch)
    expected = attend(batch, *states)
    monkeypatch.setattr(attention, "scaled_dot_product_attention", by_tokens)
    assert torch.equal(attend(batch, *states), expected)

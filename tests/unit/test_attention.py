"""Attention of many sequences in one call, against one call a sequence; by the CPU's operators.

What a GPU runs is compiled from the same mask; here the mask, the table of blocks and the rows
around them are tried, by flex attention uncompiled and by a kernel in Python that reads as a
device's does: whole blocks, no others, and what it may not see times zero.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from tandem.inference import choice, flex, tiles
from tandem.inference.attention import attend
from tandem.inference.batch import PackedBatch, Segment
from tandem.inference.cache import KVPool
from tandem.inference.decoder import Decoder
from tandem.inference.extents import SequenceCache
from tandem.inference.feed import Feed
from tandem.inference.tiles import FEW, MANY, Tiles
from tests.architectures import LLAMA, SUPPORTED, Architecture, build
from tests.parity import TOLERANCE, worst_difference

BLOCK = 16  # so that small texts have several
HEADS, GROUPS, DIM, VALUE_DIM = 2, 3, 8, 4
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_blocks_and_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tiles, flex, choice):
        monkeypatch.setattr(module, "BLOCK", BLOCK)
    name = "torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    monkeypatch.setattr(name, True)


def as_a_device_reads(query: Tensor, keys: Tensor, values: Tensor, **options: Any) -> Tensor:
    """Tile by tile: its blocks and all of them, whatever lies there."""
    mask: BlockMask = options["block_mask"]
    scale, score_mod = options["scale"] or query.shape[-1] ** -0.5, options["score_mod"]
    size, block = mask.BLOCK_SIZE
    groups = query.shape[1] // keys.shape[1]
    keys, values = (states[0].repeat_interleave(groups, 0) for states in (keys, values))
    parts = []
    for tile, count in enumerate(mask.kv_num_blocks[0, 0].tolist()):
        blocks = mask.kv_indices[0, 0, tile, :count]
        positions = (blocks[:, None] * block + torch.arange(block)).flatten()
        places = torch.arange(tile * size, (tile + 1) * size)
        scores = query[0, :, places] @ keys[:, positions].transpose(1, 2) * scale
        if score_mod is not None:
            scores = score_mod(scores)
        nothing = torch.tensor(0)
        sees = mask.mask_mod(nothing, nothing, places[:, None], positions[None])
        weights = scores.masked_fill(~sees, -torch.inf).softmax(-1).nan_to_num(0)
        parts.append(weights @ values[:, positions])
    return torch.cat(parts, 1)[None]


def scattered(rng: random.Random, most: int) -> tuple[KVPool, list[SequenceCache]]:
    """Texts of different lengths, not in the order of their extents, beside others' NaN."""
    pool = KVPool(40 * BLOCK, BLOCK)
    held = [pool.reserve(rng.randint(1, 5 * BLOCK)) for _ in range(12)]
    caches = [cache for cache in held if cache is not None]
    pool.places = torch.arange(pool.positions)
    for dim in (DIM, VALUE_DIM):  # keys and values of one layer, whose sizes differ
        states = torch.full((HEADS, pool.positions, dim), torch.nan)
        (pool.keys if dim == DIM else pool.values).append(states)
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


def states_of(pool: KVPool, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of a batch, and what the pool then holds of its texts."""
    for segment in batch.segments:
        pool.places = torch.arange(segment.start, segment.start + segment.length)
        count = segment.length
        pool.write(0, torch.randn(HEADS, count, DIM), torch.randn(HEADS, count, VALUE_DIM))
    query = torch.randn(HEADS * GROUPS, batch.token_ids.shape[1], DIM)
    return query, pool.keys[0], pool.values[0]


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
    for seed in range(8):
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


def test_what_a_former_holder_left_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text whose numbers were not finite must not reach whoever has its extent next."""
    monkeypatch.setattr(choice, "_batches", lambda _: True)
    monkeypatch.setattr(flex, "flex_attention", as_a_device_reads)
    decoder = Decoder(build(LLAMA), "tiny", cache_tokens=4 * BLOCK)
    caches = [decoder.reserve(BLOCK) for _ in range(2)]
    feeds = [Feed(cache, [1, 2, 3], 3) for cache in caches if cache is not None]
    with torch.inference_mode():
        for states in (*decoder.pool.keys, *decoder.pool.values):
            assert states.isfinite().all(), "a new pool"
            states.fill_(torch.nan)
        assert decoder.forward(feeds).isfinite().all()


NAMES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt2", "gpt_bigcode")


@pytest.mark.parametrize(
    "row", [row for row in SUPPORTED if row.model_type in NAMES], ids=lambda row: row.model_type
)
@pytest.mark.parametrize("kernel", [flex_attention, as_a_device_reads])
def test_architectures_give_the_plain_logits(
    row: Architecture, kernel: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def counting(*args: Any, **options: Any) -> Any:
        calls.append(len(args))
        return kernel(*args, **options)

    monkeypatch.setattr(choice, "_batches", lambda _: True)
    monkeypatch.setattr(flex, "flex_attention", counting)
    assert worst_difference(row) < TOLERANCE
    assert len(calls) > 20


def test_what_does_not_compile_is_one_warning_and_one_call_a_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError("NYI: at least 16\nand a page of others")

    monkeypatch.setattr(choice, "_batches", lambda _: True)
    monkeypatch.setattr(flex, "flex_attention", refuse)
    with capture_logs() as logs:
        assert worst_difference(LLAMA) < TOLERANCE
    (warning,) = [line for line in logs if line["log_level"] == "warning"]
    assert warning["reason"] == "NotImplementedError: NYI: at least 16"


def test_what_computes_otherwise_is_one_warning_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any, **options: Any) -> Any:
        return 2 * flex_attention(*args, **options)

    monkeypatch.setattr(choice, "_batches", lambda _: True)
    monkeypatch.setattr(flex, "flex_attention", wrong)
    with capture_logs() as logs:
        assert worst_difference(LLAMA) < TOLERANCE
    (warning,) = [line for line in logs if line["log_level"] == "warning"]
    assert "a ragged batch differs from a plain pass" in warning["reason"]


def test_what_the_start_compiled_serves_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as on a device, by a compiler that only counts."""
    compiled: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(len(inputs))
        return graph.forward

    torch._dynamo.reset()
    kernel = torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=backend)
    monkeypatch.setattr(flex, "flex_attention", kernel)
    monkeypatch.setattr(choice, "_batches", lambda _: True)
    decoder = Decoder(build(LLAMA), "tiny", cache_tokens=64 * BLOCK)
    at_start = len(compiled)
    assert at_start >= 2  # one for each size of a tile
    rng = random.Random(5)
    caches = [cache for cache in (decoder.reserve(7 * BLOCK) for _ in range(9)) if cache]

    @torch.inference_mode()
    def serve() -> None:
        for _ in range(30):
            chosen = rng.sample(caches, rng.randint(2, 9))
            most = rng.choice((1, FEW, MANY))
            for cache in chosen:
                cache.rollback(rng.randint(0, cache.capacity - most))
            decoder.forward([Feed(cache, [1] * rng.randint(1, most), 1) for cache in chosen])

    with ThreadPoolExecutor(1) as engine:  # the thread of the start is another one
        engine.submit(serve).result()
    assert len(compiled) == at_start

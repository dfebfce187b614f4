"""Branches on a device, as far as a CPU can test them: one-call attention, and CUDA graphs."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tandem.inference.batch import flex
from tandem.inference.batch import tiles as branch_tiles
from tandem.inference.batch.attention import attend
from tandem.inference.batch.packed import PackedBatch
from tandem.inference.batch.segment import Segment
from tandem.inference.batch.tiles import FEW, MANY, Tiles
from tandem.inference.feed import Feed
from tandem.inference.kv.branches import Branches
from tandem.inference.kv.pool import KVPool
from tandem.inference.passes import cuda_graphs as graph
from tandem.inference.passes import one_call
from tests.support.decoders import decoder_over
from tests.support.devices.flex import BLOCK, Kernel, as_a_device_reads, without_compiler
from tests.support.devices.recording import Recorder
from tests.support.devices.states import empty_pool, states_of
from tests.support.models.architectures import SMALL, SUPPORTED, Architecture, build, one_layer
from tests.support.models.parity import TOLERANCE
from tests.support.models.trees import narrow, plain_rows, random_trees, tree_rows, worst_of

ROWS = [row for row in SUPPORTED if row.model_type in ("llama", "mistral", "gemma2")]
CPU = torch.device("cpu")
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 5},
    "window over a block": {"window": BLOCK + 1},
    "own position alone": {"window": 1},
    "soft cap": {"softcap": 0.5, "window": 7},
}


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """A device, as far as it can be had on a CPU."""
    kernel = Kernel()
    without_compiler(monkeypatch)
    monkeypatch.setattr(graph, "BLOCK", BLOCK)
    monkeypatch.setattr(flex, "flex_attention", kernel)
    monkeypatch.setattr(one_call, "worthwhile", lambda _: True)
    return kernel


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.model_type)
def test_a_device_takes_trees_in_one_call_if_it_was_told_of_them(
    row: Architecture, at_once: bool, kernel: Kernel
) -> None:
    model, trees = build(one_layer(row), **narrow(row)), random_trees(5)[:10]
    expected = plain_rows(model, trees)
    decoder = decoder_over(model, "tiny", cache_tokens=40 * BLOCK, trees=at_once)
    assert decoder.takes_trees
    kernel.calls = 0
    found = [rows for group in (trees[:1], trees[1:]) for rows in tree_rows(decoder, group)]
    assert worst_of(expected, found) < TOLERANCE
    # In each layer the prompts and what comes behind the kept paths, and the two feeds between.
    assert kernel.calls == decoder.about.layers * (4 if at_once else 2)


def test_graphs_leave_trees_alone(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> None:
    recorder = Recorder()
    monkeypatch.setattr(graph, "capture", recorder)
    model, trees = build(SMALL), random_trees(6)[:4]
    expected = plain_rows(model, trees)
    decoder = decoder_over(model, "tiny", cache_tokens=40 * BLOCK, graph_rows=16, longest=5 * BLOCK)
    at_start = recorder.replays
    assert worst_of(expected, tree_rows(decoder, trees)) < TOLERANCE
    assert recorder.replays in (at_start, at_start + 1, at_start + 2), "chains are graphs"


def forest(rng: random.Random, most: int) -> tuple[KVPool, list[Feed]]:
    """Feeds of texts with and without branches, old and new ones, beside others' NaN."""
    pool = empty_pool(60)
    held = [pool.reserve(rng.randint(9, 6 * BLOCK)) for _ in range(9)]
    feeds = []
    for cache in rng.sample([cache for cache in held if cache], rng.randint(2, 8)):
        pool.clear(cache)
        old = rng.randint(0, 8)
        new = rng.randint(1, min(most, cache.capacity - old))
        cache.length = rng.randint(0, cache.capacity - old - new)
        cache.grow([1] * old, [rng.randint(0, i) for i in range(old)])
        tree = rng.randint(0, new)
        before = old if tree == new else 0  # a trunk that grows forgets the old ones
        parents = [rng.randint(0, before + i) for i in range(tree)]
        feeds.append(Feed(cache, [1] * new, 0, parents or None))
    return pool, feeds


def both(feeds: list[Feed]) -> tuple[PackedBatch, PackedBatch]:
    """For one call, and for one call a sequence."""
    return PackedBatch.of(feeds, CPU, True, True), PackedBatch.of(feeds, CPU)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most", [2, FEW, MANY])
def test_one_call_sees_what_the_calls_one_by_one_see(
    kind: str, most: int, small_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    for seed in range(4):
        pool, feeds = forest(random.Random(seed), most)
        tiled, looped = both(feeds)
        query, keys, values = states_of(pool, tiled)
        expected = attend(looped, query, keys, values, **KINDS[kind])
        with monkeypatch.context() as patch:
            patch.setattr(flex, "flex_attention", as_a_device_reads)
            found = attend(tiled, query, keys, values, **KINDS[kind])
        assert (found - expected).abs().max() < 1e-5
        # Flex attention uncompiled reads all there is.
        stale = [torch.where(states.isnan(), 50.0, states) for states in (keys, values)]
        found = attend(tiled, query, stale[0], stale[1], **KINDS[kind])
        assert (found - expected).abs().max() < 1e-5


@pytest.mark.parametrize("window", [None, 1, 5, BLOCK + 1])
@pytest.mark.parametrize("most", [2, FEW, MANY])
def test_the_table_has_the_blocks_that_are_needed(
    window: int | None, most: int, small_blocks: None
) -> None:
    for seed in range(5):
        pool, feeds = forest(random.Random(seed), most)
        tiles = both(feeds)[0].tiles
        assert tiles is not None
        mask = tiles.mask(window, pool.positions)
        sizes = (len(tiles.rows), pool.positions)
        assert mask.seq_lengths == sizes
        asked = create_block_mask(mask.mask_mod, None, None, *sizes, CPU, mask.BLOCK_SIZE)
        dense = asked.to_dense()[0, 0].bool()
        for needed, count, found in zip(
            dense, mask.kv_num_blocks[0, 0], mask.kv_indices[0, 0], strict=True
        ):
            read = found[: int(count)].tolist()
            assert set(needed.nonzero().flatten().tolist()) <= set(read)
            assert read == list(range(read[0], read[-1] + 1))
            assert needed[read[-1]], "the block of its last row"


def test_chains_alone_have_the_tiles_that_they_had() -> None:
    pool = KVPool(10 * BLOCK, BLOCK)
    feeds = [
        Feed(cache, [1, 2, 3], 0, parents)
        for cache, parents in ((pool.reserve(BLOCK), None), (pool.reserve(BLOCK), (0, 1)))
        if cache
    ]
    assert type(both(feeds)[0].tiles) is Tiles


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


MUTANTS: dict[str, Callable[[Segment], Segment]] = {
    "siblings seen": siblings_seen,
    "a position off": deeper,
    "another extent": lambda segment: replace(segment, start=segment.start + BLOCK),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_of_the_mask_are_caught(
    mutant: str, small_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(4)
    monkeypatch.setattr(flex, "flex_attention", as_a_device_reads)
    pool, feeds = forest(random.Random(4), FEW)
    tiled, looped = both(feeds)
    query, keys, values = (part.nan_to_num(7.0) for part in states_of(pool, tiled))
    expected = attend(looped, query, keys, values, window=5)
    tiled.tiles = branch_tiles.BranchTiles([MUTANTS[mutant](one) for one in tiled.segments], CPU)
    assert (attend(tiled, query, keys, values, window=5) - expected).abs().max() > 1e-2


def test_what_does_not_compile_for_trees_is_one_warning_and_chains_are_one_call(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise NotImplementedError("NYI: gathers\nand a page of others")

    monkeypatch.setattr(branch_tiles.BranchTiles, "_make", refuse)
    with capture_logs() as logs:
        decoder = decoder_over(build(SMALL), "tiny", cache_tokens=4 * BLOCK, trees=True)
    (warning,) = [line for line in logs if line["log_level"] == "warning"]
    assert warning["reason"] == "NotImplementedError: NYI: gathers"
    backend = decoder._backends.current
    assert (backend.in_one_call, backend.branches_in_one_call) == (True, False)
    assert decoder.takes_trees


def test_what_the_start_compiled_serves_every_batch(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of chains and of trees; traced as on a device, by a compiler that only counts."""
    compiled: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(len(inputs))
        return graph.forward

    torch._dynamo.reset()
    counting = torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=backend)
    monkeypatch.setattr(flex, "flex_attention", counting)
    model = build(SMALL)
    decoder = decoder_over(model, "tiny", cache_tokens=64 * BLOCK, trees=True)
    at_start = len(compiled)
    assert at_start >= 4  # for chains and for trees, one for each size of a tile
    assert decoder._backends.current.branches_in_one_call
    rng = random.Random(5)
    caches = [cache for cache in (decoder.reserve(7 * BLOCK, 1) for _ in range(9)) if cache]

    @torch.inference_mode()
    def serve() -> None:
        for trees in (False, True) * 10:
            chosen = rng.sample(caches, rng.randint(2, 9))
            most = rng.choice((1 + trees, FEW, MANY))
            feeds = []
            for cache in chosen:
                cache.rollback(rng.randint(0, cache.capacity - most))
                count = rng.randint(1, most)
                parents = [rng.randint(0, i) for i in range(trees and rng.randint(0, count))]
                feeds.append(Feed(cache, [1] * count, 1, parents or None))
            decoder.forward(feeds)

    with ThreadPoolExecutor(1) as engine:  # the thread of the start is another one
        engine.submit(serve).result()
    assert len(compiled) == at_start

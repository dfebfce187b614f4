"""Batches of random texts in a pool of one layer: chains and trees, prompts and single rows."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.inference.batch.segment import Segment
from tandem.inference.feed import Feed
from tandem.inference.kv.pool import KVPool

# Query heads, key heads, numbers of a key, numbers of a value.
Heads = tuple[int, int, int, int]
HEADS: Heads = (6, 2, 8, 4)


def empty_pool(positions: int, heads: Heads = HEADS) -> KVPool:
    """A pool of one layer, filled with NaN, as uninitialised memory may be."""
    _, count, width, value_width = heads
    pool = KVPool(positions)
    pool.keys.append(torch.full((count, pool.positions + 1, width), torch.nan))
    pool.values.append(torch.full((count, pool.positions + 1, value_width), torch.nan))
    return pool


def forest(
    rng: random.Random, most: int, pool: KVPool, texts: int = 8, trees: bool = True
) -> list[Feed]:
    """Feeds of texts of different lengths, not in the order of their extents.

    Args:
        rng: draws all of it.
        most: rows of a feed.
        pool: of which extents are reserved.
        texts: at most.
        trees: whether some have branches, old and new ones.
    """
    held = [pool.reserve(rng.randint(9, most + 60)) for _ in range(texts + 2)]
    feeds = []
    for cache in rng.sample([cache for cache in held if cache], rng.randint(1, texts)):
        old = rng.randint(0, 8) if trees else 0
        new = rng.randint(1, max(1, min(most, cache.capacity - old)))
        cache.length = rng.randint(0, cache.capacity - old - new)
        cache.grow([1] * old, [rng.randint(0, i) for i in range(old)])
        tree = rng.choice((0, rng.randint(0, new), new)) if trees else 0
        before = old if tree == new else 0  # a trunk that grows forgets the old ones
        parents = [rng.randint(0, before + i) for i in range(tree)]
        feeds.append(Feed(cache, [1] * new, 0, parents or None))
    return feeds


def fill(
    pool: KVPool, segments: Sequence[Segment], heads: Heads = HEADS
) -> tuple[Tensor, Tensor, Tensor]:
    """Random queries [Hq, T, D] of a batch, and the pool's keys and values, filled."""
    queries, count, width, value_width = heads
    for one in segments:
        pool.slots = torch.arange(one.start, one.start + one.length)
        pool.write(
            0,
            torch.randn(count, one.length, width),
            torch.randn(count, one.length, value_width),
        )
    rows = sum(one.count for one in segments)
    return torch.randn(queries, rows, width), pool.keys[0], pool.values[0]

"""Random keys, values and queries of texts in a pool of one layer."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.inference.batch.packed import PackedBatch
from tandem.inference.kv.pool import KVPool
from tests.support.devices.flex import BLOCK

HEADS, GROUPS, DIM, VALUE_DIM = 2, 3, 8, 4


def empty_pool(blocks: int) -> KVPool:
    """A pool of one layer, filled with NaN, as uninitialised memory may be."""
    pool = KVPool(blocks * BLOCK, BLOCK)
    pool.keys.append(torch.full((HEADS, pool.positions, DIM), torch.nan))
    pool.values.append(torch.full((HEADS, pool.positions, VALUE_DIM), torch.nan))
    return pool


def states_of(pool: KVPool, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Random queries of a batch, and the pool's keys and values, filled for its texts."""
    for segment in batch.segments:
        pool.slots = torch.arange(segment.start, segment.start + segment.length)
        count = segment.length
        pool.write(0, torch.randn(HEADS, count, DIM), torch.randn(HEADS, count, VALUE_DIM))
    query = torch.randn(HEADS * GROUPS, batch.token_ids.shape[1], DIM)
    return query, pool.keys[0], pool.values[0]

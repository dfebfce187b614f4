"""Keys, values and queries of random texts in a pool of one layer."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.inference.batch.packed import PackedBatch
from tandem.inference.kv.pool import KVPool
from tests.support.devices.flex import BLOCK

HEADS, GROUPS, DIM, VALUE_DIM = 2, 3, 8, 4


def empty_pool(blocks: int) -> KVPool:
    """Of one layer, full of NaN, as memory is that nobody has written yet."""
    pool = KVPool(blocks * BLOCK, BLOCK)
    pool.keys.append(torch.full((HEADS, pool.positions, DIM), torch.nan))
    pool.values.append(torch.full((HEADS, pool.positions, VALUE_DIM), torch.nan))
    return pool


def states_of(pool: KVPool, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of a batch, and what the pool then holds of its texts."""
    for segment in batch.segments:
        pool.slots = torch.arange(segment.start, segment.start + segment.length)
        count = segment.length
        pool.write(0, torch.randn(HEADS, count, DIM), torch.randn(HEADS, count, VALUE_DIM))
    query = torch.randn(HEADS * GROUPS, batch.token_ids.shape[1], DIM)
    return query, pool.keys[0], pool.values[0]

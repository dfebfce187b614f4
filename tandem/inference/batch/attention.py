"""Attention of a packed batch over the pool: each sequence reads its own extent, in place.

On a CPU one call per sequence is fastest. A device gets one call for all sequences.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from tandem.inference.batch.packed import PackedBatch
from tandem.inference.batch.segment import Segment
from tandem.kernels import attention as kernel

# Rows of a prompt's chunk from which on flash attention is faster.
_LONG = 512


def attend(
    batch: PackedBatch,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of the new tokens to their own sequences.

    Args:
        batch: the sequences, and where they are in the pool.
        query: [Hq, T, D] of the batch.
        keys: [H, positions, D], the pool's.
        values: [H, positions, Dv], the pool's.
        scaling: of the scores; 1/sqrt(D) by default.
        window: positions that a token sees, its own included; all by default.
        softcap: bounds the scores as softcap * tanh(score / softcap).

    Returns:
        [T, Hq, Dv].
    """
    if batch.tiles is not None and not _is_long(batch, query, values, window, softcap):
        tiles, rows = batch.tiles.seen(window)
        return kernel.attend(
            query,
            keys,
            values,
            tiles,
            rows,
            batch.tiles.counts,
            batch.tiles.size,
            batch.tiles.words,
            scaling or query.shape[-1] ** -0.5,
            softcap or 0.0,
        )
    # Views of the whole, once per layer: each text's part is then a single `narrow`.
    query, keys, values = query[None], keys[None], values[None]
    parts = [
        _attend_one(batch, query, keys, values, segment, scaling, window, softcap)
        for segment in batch.segments
    ]
    seen = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
    return seen[0].transpose(0, 1)


def _attend_one(
    batch: PackedBatch,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    segment: Segment,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """[1, Hq, n, Dv] of one sequence's n new tokens."""
    heads, groups = keys.shape[1], query.shape[1] // keys.shape[1]
    count, end = segment.count, segment.start + segment.length
    if _by_flash(query, values, segment, window, softcap):
        k, v = (states.narrow(2, segment.start, segment.length) for states in (keys, values))
        q = query.narrow(2, segment.first, count)
        seen_by = causal_lower_right(count, segment.length)
        return scaled_dot_product_attention(q, k, v, seen_by, scale=scaling, enable_gqa=True)
    q = query if count == query.shape[2] else query.narrow(2, segment.first, count)
    if groups > 1:  # heads that share a key head become rows of one query, to not repeat keys
        q = q.reshape(1, heads, groups * count, -1)
    if segment.branches is None:
        seen = segment.length if window is None else min(segment.length, window + count - 1)
        mask = batch.mask(count, seen, window, groups, q)
    else:
        mask = batch.branch_mask(segment, window, groups, q)
        seen = mask.shape[1]
    k, v = keys.narrow(2, end - seen, seen), values.narrow(2, end - seen, seen)
    if softcap is None:
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    else:
        out = _soft_capped(q, k, v, mask, scaling or query.shape[-1] ** -0.5, softcap)
    # Not a view: kernels of a GPU lay their result out otherwise.
    return out if groups == 1 else out.reshape(1, heads * groups, count, -1)


def _is_long(
    batch: PackedBatch, query: Tensor, values: Tensor, window: int | None, softcap: float | None
) -> bool:
    """Whether a batch is a long chunk of a prompt, which torch's own kernel computes faster."""
    first, *others = batch.segments
    if others or first.count < _LONG:
        return False
    return _by_flash(query, values, first, window, softcap)


def _by_flash(
    query: Tensor, values: Tensor, segment: Segment, window: int | None, softcap: float | None
) -> bool:
    """Whether flash attention computes a segment: the chunk of a prompt, without a mask, which
    would have as many elements as all scores."""
    return (
        query.is_cuda
        and query.dtype != torch.float32
        and segment.count > 1
        and segment.branches is None
        and softcap is None
        and (window is None or window >= segment.length)
        and query.shape[-1] == values.shape[-1] <= 256
        and query.shape[-1] % 8 == 0
        and _has_flash(query.device)
    )


@cache
def _has_flash(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _soft_capped(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, softcap: float
) -> Tensor:
    """Attention with bounded scores, which torch has no fused kernel for."""
    scores = torch.tanh(q @ k.transpose(-1, -2) * (scaling / softcap)) * softcap
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v

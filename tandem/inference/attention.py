"""Attention of a packed batch over the pool: each sequence looks at its own extent, in place."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tandem.inference.batch import PackedBatch, Segment


def attend(
    batch: PackedBatch,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """What the new tokens see of their own sequences.

    Args:
        batch: who feeds what, and where it lies.
        query: [Hq, T, D] of the batch.
        keys: [H, positions, D], the pool's.
        values: [H, positions, Dv], the pool's.
        scaling: of the scores; 1/sqrt(D) by default.
        window: positions that a token sees, its own included; all by default.
        softcap: bounds the scores as softcap * tanh(score / softcap).

    Returns:
        [T, Hq, Dv].
    """
    parts = [
        _attend_one(batch, query, keys, values, segment, scaling, window, softcap)
        for segment in batch.segments
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


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
    """[n, Hq, Dv] of one sequence's n new tokens."""
    heads, groups, head_dim = len(keys), len(query) // len(keys), query.shape[-1]
    count, end = segment.count, segment.start + segment.length
    # Heads that share a key head become rows of one query: keys are not repeated.
    own = query if count == query.shape[1] else query.narrow(1, segment.first, count)
    q = own.reshape(1, heads, groups * count, head_dim)
    seen = segment.length if window is None else min(segment.length, window + count - 1)
    k = keys.narrow(1, end - seen, seen).unsqueeze(0)
    v = values.narrow(1, end - seen, seen).unsqueeze(0)
    mask = batch.mask(count, seen, window, groups, q)
    if softcap is None:
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    else:
        out = _soft_capped(q, k, v, mask, scaling or head_dim**-0.5, softcap)
    out = out.view(heads, groups, count, -1).permute(2, 0, 1, 3)
    return out.reshape(count, heads * groups, -1)


def _soft_capped(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, softcap: float
) -> Tensor:
    """Attention with bounded scores, which torch has no fused kernel for."""
    scores = torch.tanh(q @ k.transpose(-1, -2) * (scaling / softcap)) * softcap
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v

"""Attention of a packed batch over the pool, for any model of `transformers`.

Models call the function that is registered under their attention implementation's name; this
one lets every sequence look at its own extent, and copies nothing.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from tandem.errors import Unsupported
from tandem.inference.batch import PackedBatch, Segment

_names = itertools.count()


class PackedAttention:
    """Registers itself, so that each model reads its own batch.

    Attributes:
        name: to be given to the model as its attention implementation.
        batch: the one in flight.
        checking: whether layers are asked if they want more than is done here.
    """

    def __init__(self) -> None:
        self.name = f"tandem_{next(_names)}"
        self.batch: PackedBatch | None = None
        self.checking = False
        AttentionInterface.register(self.name, self._attend)

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Called by each layer.

        Args:
            module: the layer.
            query: [1, Hq, T, D] of the batch.
            key: [H, positions, D], the pool's.
            value: [H, positions, Dv], the pool's.
            attention_mask: none: the batch knows who sees what.
            scaling: of the scores; 1/sqrt(D) by default.
            sliding_window: positions that a token sees, its own included; all by default.
            softcap: bounds the scores as softcap * tanh(score / softcap).

        Returns:
            [1, T, Hq, Dv], and no attention weights.
        """
        if self.checking:
            _refuse_what_is_unknown(module, sliding_window, kwargs)
        assert self.batch is not None
        heads, groups = key.shape[0], query.shape[1] // key.shape[0]
        # Heads that share a key head become rows of one query: keys are not repeated.
        query = query.view(heads, groups, *query.shape[2:])
        parts = [
            self._one(query, key, value, segment, scaling, sliding_window, softcap)
            for segment in self.batch.segments
        ]
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None

    def _one(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        segment: Segment,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """[n, Hq, Dv] of one sequence's n new tokens."""
        assert self.batch is not None
        heads, groups, _, head_dim = query.shape
        count, end = segment.count, segment.start + segment.length
        q = query[:, :, segment.first : segment.first + count].reshape(1, heads, -1, head_dim)
        seen = segment.length if window is None else min(segment.length, window + count - 1)
        k, v = key[None, :, end - seen : end], value[None, :, end - seen : end]
        mask = self.batch.mask(count, seen, window, groups, q)
        if softcap is None:
            out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
        else:
            out = _soft_capped(q, k, v, mask, scaling or head_dim**-0.5, softcap)
        return out.view(heads, groups, count, -1).permute(2, 0, 1, 3).flatten(1, 2)


def _soft_capped(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, softcap: float
) -> Tensor:
    """Attention with bounded scores, which torch has no fused kernel for."""
    scores = torch.tanh(q @ k.transpose(-1, -2) * (scaling / softcap)) * softcap
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v


def _refuse_what_is_unknown(
    module: nn.Module, sliding_window: int | None, kwargs: dict[str, Any]
) -> None:
    """A model may ask for more than this attention does: sinks, biases, masks of its own."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    slides = getattr(config, "sliding_window", None) is not None
    if kinds and layer is not None and layer < len(kinds):
        slides = kinds[layer] == "sliding_attention"
    elif not getattr(config, "use_sliding_window", True):
        slides = False
    if slides and sliding_window is None:
        # Mostly wider than the probe, which would not notice.
        raise Unsupported("a sliding window that is only in its mask")
    for name in ("s_aux", "position_bias", "head_mask"):
        if kwargs.get(name) is not None:
            raise Unsupported(f"attention with {name!r}")

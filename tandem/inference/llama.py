"""The pass of a Llama-like model as a plain list of operators.

`transformers` spends more time between the operators of a small model than in them: modules,
hooks, masks and keyword arguments take about 0.3 ms a layer and 0.4 ms a pass, whatever the
model's width. The families whose layers are alike run through this file instead; all others
run through their own modules, and the start compares either with a plain pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu
from transformers import PreTrainedModel

from tandem.inference.attention import attend
from tandem.inference.batch import PackedBatch
from tandem.inference.cache import KVPool
from tandem.inference.support import max_positions

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# Positions whose rotation is computed at first; then twice as many whenever a text is longer.
_FIRST_TURNS = 1024


class LlamaPass(nn.Module):
    """Embedding, layers, norm and head. Inference only; takes its weights out of the model.

    Args:
        model: one that `fits`; its own layers are empty afterwards.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        inner: Any = model.model
        self._embed, self._rotary, self._head = inner.embed_tokens, inner.rotary_emb, model.lm_head
        del model.lm_head  # its weights may be laid out anew
        self._norm: Tensor = inner.norm.weight.detach()
        self._eps: float = inner.norm.variance_epsilon
        self._max_positions = max_positions(model.config)
        # [positions, 2, D]: cosines, and sines with the sign of rotate_half.
        self._turns = self._norm.new_empty(0)
        self.layers = nn.ModuleList()
        while inner.layers:  # one by one, so that no two copies of the model exist
            self.layers.append(_Layer(inner.layers[0]))
            del inner.layers[0]

    @staticmethod
    def fits(model: PreTrainedModel) -> bool:
        """Whether the model is of a family that is computed here, without anything special."""
        config: Any = model.config
        if config.model_type not in _FAMILIES or config.hidden_act != "silu":
            return False
        if config.model_type == "llama" and getattr(config, "sliding_window", None) is not None:
            return False  # which its modules leave to the cache
        if config.rope_parameters["rope_type"] in ("dynamic", "longrope"):
            return False  # frequencies that depend on the text's length
        inner: Any = model.model
        if not all(_plain(part) for layer in inner.layers for part in _projections(layer)):
            return False
        cos, _ = inner.rotary_emb(inner.norm.weight, torch.zeros(1, 1, device=model.device))
        return bool(cos.shape[-1] == inner.layers[0].self_attn.head_dim)

    def forward(self, batch: PackedBatch, pool: KVPool) -> Tensor:
        """[R, V] logits of the rows that the batch asks for; the pool takes its keys and values."""
        states = self._embed(batch.token_ids[0])
        rotation = self._rotation(batch, states)
        for index, layer in enumerate(self.layers):
            states = layer(states, rotation, batch, pool, index)
        states = rms_norm(states[batch.rows], self._norm.shape, self._norm, self._eps)
        logits: Tensor = self._head(states)
        return logits

    def _rotation(self, batch: PackedBatch, like: Tensor) -> Tensor:
        """[T, 2, D] of each token's position."""
        longest = max(segment.length for segment in batch.segments)
        if longest > len(self._turns):
            count = max(_FIRST_TURNS, 2 ** (longest - 1).bit_length())
            count = max(longest, min(count, self._max_positions))
            positions = torch.arange(count, device=like.device)
            cos, sin = self._rotary(like, positions[None])
            low, high = sin.chunk(2, -1)
            self._turns = torch.stack((cos[0], torch.cat((-low, high), -1)[0]), 1)
        turns: Tensor = self._turns[batch.positions[0]]
        return turns


class _Layer(nn.Module):
    """Attention and MLP, with the projections of one input fused into one product."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self._head_dim: int = attention.head_dim
        self._key_heads = attention.k_proj.out_features // self._head_dim
        self._query_heads = attention.q_proj.out_features // self._head_dim
        self._scaling: float = attention.scaling
        self._window = _window_of(attention)
        self._query_norm = _norm_of(attention, "q_norm")
        self._key_norm = _norm_of(attention, "k_norm")
        self._before = layer.input_layernorm.weight.detach()
        self._between = layer.post_attention_layernorm.weight.detach()
        self._eps: float = layer.input_layernorm.variance_epsilon
        self.qkv = _fused(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = attention.o_proj
        self.gate_up = _fused(mlp.gate_proj, mlp.up_proj)
        self.down = mlp.down_proj

    def forward(
        self,
        states: Tensor,
        rotation: Tensor,
        batch: PackedBatch,
        pool: KVPool,
        index: int,
    ) -> Tensor:
        """[T, E] to [T, E]."""
        projected = self.qkv(rms_norm(states, self._before.shape, self._before, self._eps))
        heads = projected.view(len(states), -1, self._head_dim)
        turned, value = heads[:, : -self._key_heads], heads[:, -self._key_heads :]
        if self._query_norm is not None and self._key_norm is not None:
            query, key = turned[:, : self._query_heads], turned[:, self._query_heads :]
            shape = (self._head_dim,)
            query = rms_norm(query, shape, self._query_norm, self._eps)
            turned = torch.cat((query, rms_norm(key, shape, self._key_norm, self._eps)), 1)
        # Half a turn of x times this sine is rotate_half(x) * sin.
        cos, sin = rotation[:, :1], rotation[:, 1:]
        turned = torch.addcmul(turned * cos, turned.roll(self._head_dim // 2, -1), sin)
        turned = turned.transpose(0, 1)
        query, key = turned[: self._query_heads], turned[self._query_heads :]
        keys, values = pool.update(key[None], value.transpose(0, 1)[None], index)
        seen = attend(batch, query, keys, values, self._scaling, self._window)
        states = states + self.out(seen.flatten(1))
        inputs = rms_norm(states, self._between.shape, self._between, self._eps)
        gate, up = self.gate_up(inputs).chunk(2, -1)
        states = states + self.down(silu(gate).mul_(up))
        return states


def _projections(layer: Any) -> Iterator[nn.Module]:
    attention, mlp = layer.self_attn, layer.mlp
    yield from (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    yield from (mlp.gate_proj, mlp.up_proj, mlp.down_proj)


def _plain(part: nn.Module) -> bool:
    """Whether it is a linear layer, and not one that is quantised, adapted or wrapped."""
    if type(part) is not nn.Linear or "forward" in vars(part):
        return False
    return type(part.weight) is nn.Parameter


def _window_of(attention: Any) -> int | None:
    """Positions that a token sees; None for all. Mistral alone keeps it in its configuration."""
    holder = attention.config if attention.config.model_type == "mistral" else attention
    window: int | None = getattr(holder, "sliding_window", None)
    return window


def _norm_of(attention: Any, name: str) -> Tensor | None:
    norm = getattr(attention, name, None)
    return None if norm is None else norm.weight.detach()


def _fused(*parts: nn.Linear) -> nn.Linear:
    """One layer for several of the same input."""
    weight = torch.cat([part.weight.detach() for part in parts])
    bias = None if parts[0].bias is None else torch.cat([part.bias.detach() for part in parts])
    fused = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    fused.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        fused.bias = nn.Parameter(bias, requires_grad=False)
    return fused

"""A head's decoder layer over pieces of texts, differentiable in its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import rms_norm


class Pieces:
    """Places of texts as unbroken runs, one a row.

    Args:
        piece: [n] int64, ascending from 0: which run a place is in.
    """

    def __init__(self, piece: Tensor) -> None:
        counts = torch.bincount(piece)
        begins = counts.cumsum(0) - counts
        self._at = piece, torch.arange(len(piece)) - begins[piece]
        self._shape = len(counts), int(counts.max())

    def padded(self, of_places: Tensor) -> Tensor:
        """[pieces, time, width] of [n, width], 0 after a piece's end."""
        padded = of_places.new_zeros(*self._shape, of_places.shape[-1])
        return padded.index_put(self._at, of_places)

    def flat(self, of_pieces: Tensor) -> Tensor:
        """[n, width] of [pieces, time, width]."""
        return of_pieces[self._at]


class PieceLayer:
    """Called once a depth: first over what is known at the places of pieces, then over what was
    guessed after each of them, which sees the known places up to its own, and the guesses before it
    (the training-time test of EAGLE-3, arXiv 2503.01840).

    Args:
        layer: of `transformers`, without weights.
        rotary: its module that computes rotations.
        epsilon: of its norms.
        tensors: the weights, by their names within the layer.
    """

    def __init__(
        self, layer: nn.Module, rotary: Any, epsilon: float, tensors: Mapping[str, Tensor]
    ) -> None:
        self._layer, self._rotary, self._epsilon = _Layer(layer).eval(), rotary, epsilon
        self._tensors = {f"layer.{name}": tensor for name, tensor in tensors.items()}
        self._kept = _Kept()

    def __call__(self, states: Tensor, read: Tensor | None = None) -> Tensor:
        """[pieces, time, width] to the same, of the next depth.

        Args:
            states: of each place.
            read: [pieces, time, *] what attention reads; None for the states after the norm.
        """
        time, depth = states.shape[1], len(self._kept.keys)
        known = torch.ones(time, time, dtype=torch.bool).tril()
        guessed = torch.eye(time, dtype=torch.bool).repeat(1, depth)
        mask = torch.zeros(time, (1 + depth) * time)
        mask.masked_fill_(~torch.cat([known, guessed], 1), -torch.inf)
        angles = self._rotary(states, depth + torch.arange(time)[None])
        found: Tensor = functional_call(
            self._layer, self._tensors, (states, read, angles, mask, self._kept)
        )
        return found

    def norm(self, weight: Tensor) -> Callable[[Tensor], Tensor]:
        """A norm of its kind."""
        return partial(rms_norm, normalized_shape=weight.shape, weight=weight, eps=self._epsilon)


class _Layer(nn.Module):
    """A layer whose attention may read something else than its states."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer: Any = layer

    def forward(
        self, states: Tensor, read: Tensor | None, angles: Any, mask: Tensor, kept: _Kept
    ) -> Tensor:
        own = self.layer
        if read is None:
            read = states if own.input_layernorm is None else own.input_layernorm(states)
        seen, _ = own.self_attn(
            hidden_states=read,
            position_embeddings=angles,
            attention_mask=mask,
            past_key_values=kept,
        )
        states = states + seen
        found: Tensor = states + own.mlp(own.post_attention_layernorm(states))
        return found


class _Kept:
    """Keys and values of all depths so far, under the name that `transformers` calls."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        self.keys.append(keys)
        self.values.append(values)
        return torch.cat(self.keys, 2), torch.cat(self.values, 2)

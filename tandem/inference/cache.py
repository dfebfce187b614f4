"""The KV cache of one sequence: a slot allocated once, rewound by moving a length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer


class SlotLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values [1, heads, capacity, head_dim] of one layer, written in place.

    Sliding-window models get whole-length layers too: their attention masks cut the window,
    and a window that had dropped its oldest entries could not be rewound.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the slot in the shape and dtype of the first states."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = (
            torch.empty(
                (*states.shape[:2], self.capacity, states.shape[-1]),
                dtype=states.dtype,
                device=states.device,
            )
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append states [1, heads, n, head_dim]; return all keys and values so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[-2]
        self.keys[..., self.length : end, :] = key_states
        self.values[..., self.length : end, :] = value_states
        self.length = end
        return self.keys[..., :end, :], self.values[..., :end, :]

    def get_seq_length(self) -> int:
        """The number of positions in use."""
        return self.length


class SequenceCache(Cache):  # type: ignore[misc]
    """One sequence's KV cache for a model of any number of attention layers."""

    def __init__(self, capacity: int) -> None:
        super().__init__(layer_class_to_replicate=lambda: SlotLayer(capacity))
        self.capacity = capacity

    @property
    def length(self) -> int:
        """Positions held."""
        return int(self.get_seq_length())

    def rollback(self, length: int) -> None:
        """Forget all positions at or beyond `length`."""
        for layer in self.layers:
            layer.length = min(layer.length, length)

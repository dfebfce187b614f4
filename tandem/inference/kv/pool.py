"""The KV cache: one pool of positions, in which every sequence reserves an extent.

An extent is contiguous, so that attention reads it in place. A rejected draft is undone by
setting a length back, and for an accepted branch only its own rows are copied. A prefix that is
found is copied too, once, when a sequence opens.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from tandem.inference.kv.extents import Extents, SequenceCache

__all__ = ["KVPool", "SequenceCache"]


# Positions that are copied aside at a time, where a text's old and new places overlap.
_PIECE = 256
# Memory of a CPU comes in huge pages where the process asks for them: long texts are read faster.
_PAGE = 2 << 20
# A pool takes this many times its room of addresses, but no more memory, to begin with pages.
_MOST_PADDED = 1.13


class KVPool(Extents, Cache):  # type: ignore[misc]
    """Keys and values [heads, positions, head_dim] of every layer, allocated once.

    Sliding-window layers keep all positions too, and attention cuts the window: a window without
    its oldest entries could not be rewound.

    Attributes:
        cycles: how often the model uses its layers; each use has layers of its own here.
        folded: pool of the layers of the first cycle with the slots of all cycles, one after the
            other, `stride` slots each; None where there is one cycle.

    Args:
        positions: that all sequences may hold together.
        cycles: see above.
    """

    def __init__(self, positions: int, cycles: int = 1) -> None:
        Extents.__init__(self, positions)
        Cache.__init__(self, layers=[])
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.cycles = cycles
        self.folded: KVPool | None = None
        # [layers, heads, positions, head_dim] of layers that are alike, if they were made together.
        self._together: list[Tensor] = []
        # [T] positions of the pool that the current batch writes to.
        self.slots = torch.empty(0, dtype=torch.int64)

    @property
    def scratch(self) -> int:
        """A slot after all sequences' slots, for padding."""
        return self.positions

    @property
    def stride(self) -> int:
        """Slots of a layer, the one for padding among them."""
        return self.positions + 1

    def resized(self, positions: int) -> KVPool:
        """An empty pool with the same layers. Allocated at once, to fail now or never; layers of a
        form in one piece, so that positions are moved in all of them by a few operators.
        """
        pool = KVPool(positions, self.cycles)
        layers, count = [*self.keys, *self.values], len(self.keys)
        group, stride = count // self.cycles, pool.stride
        alike: dict[tuple[int, int], list[int]] = {}
        for place, states in enumerate(layers):
            if place % max(count, 1) < group:  # of the first cycle
                alike.setdefault((states.shape[0], states.shape[2]), []).append(place)
        folded = list(layers)
        for (heads, head_dim), places in alike.items():
            size = len(places), heads, self.cycles * stride, head_dim
            whole = _in_pages(layers[places[0]], size)
            for cycle in range(self.cycles):
                part = whole.narrow(2, cycle * stride, stride)
                pool._together.append(part)
                for place, states in zip(places, part, strict=True):
                    layers[place + cycle * group] = states
            for place, states in zip(places, whole, strict=True):
                folded[place] = states
        pool.keys, pool.values = layers[:count], layers[count:]
        if self.cycles > 1:
            own = pool.folded = KVPool(self.cycles * stride - 1)
            own.keys, own.values = folded[:group], folded[count : count + group]
        return pool

    def beside(self) -> KVPool:
        """The same layers, for a pass that runs at the same time."""
        return copy.copy(self)

    @property
    def bytes_per_position(self) -> int:
        """Bytes of one position in all layers; known once a token was fed."""
        return sum(
            states.shape[0] * states.shape[2] * states.element_size()
            for states in (*self.keys, *self.values)
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """`write` under the name that `transformers` calls; states are [1, heads, T, head_dim]."""
        return self.write(layer_idx, key_states[0], value_states[0])

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write a batch's states [heads, T, head_dim] in place; return the whole layer.

        `attention.py` finds each sequence's extent in it.
        """
        all_keys, all_values = self.layer(layer, keys, values)
        all_keys.index_copy_(1, self.slots, keys)
        all_values.index_copy_(1, self.slots, values)
        return all_keys, all_values

    def layer(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer; made for states of this form [heads, T, head_dim] if it is
        the first time."""
        if layer == len(self.keys):
            self._allocate(keys, values)
        return self.keys[layer], self.values[layer]

    @torch.inference_mode()
    def move(self, slots: Sequence[int], to: Sequence[int]) -> None:
        """See `PositionPool.move`. All is read before it is written, so overlaps do no harm."""
        if not self.keys:
            return
        first, count = slots[0], len(slots)
        by = abs(first - to[0])
        all_layers = self._together or [states[None] for states in (*self.keys, *self.values)]
        if by >= count and list(slots) == list(range(first, first + count)):
            for layers in all_layers:  # in a line, as those of a prefix mostly are
                layers.narrow(2, to[0], count).copy_(layers.narrow(2, first, count))
            return
        if count > _PIECE:  # a text that is moved within its room: not all of it is copied aside
            pieces = [slice(at, at + _PIECE) for at in range(0, count, _PIECE)]
            for piece in pieces if to[0] < first else reversed(pieces):
                self.move(slots[piece], to[piece])
            return
        index = torch.tensor(slots, dtype=torch.int64)
        index = index.to(self.keys[0].device, non_blocking=True)
        for layers in all_layers:
            layers.narrow(2, to[0], count).copy_(layers.index_select(2, index))

    def _allocate(self, *states: Tensor) -> None:
        """Allocate a layer for states of this form [heads, T, head_dim]."""
        for layers, first in zip((self.keys, self.values), states, strict=True):
            heads, _, head_dim = first.shape
            layers.append(first.new_empty(heads, self.scratch + 1, head_dim))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Required by `Cache`, but unused: models get positions. The pool has no single length."""
        return 0


def _in_pages(like: Tensor, size: tuple[int, int, int, int]) -> Tensor:
    """Uninitialised memory [layers, heads, positions, head_dim]. Of a large pool on a CPU each
    head's positions begin with a page: a text would else take one more of each head."""
    layers, heads, length, width = size
    row = width * like.element_size()
    in_step = _PAGE // math.gcd(_PAGE, row)
    padded = -(-length // in_step) * in_step
    if like.device.type != "cpu" or padded > length * _MOST_PADDED:
        return like.new_empty(size)
    count = layers * heads * padded * width
    flat = like.new_empty(count + _PAGE // like.element_size())
    begin = -flat.data_ptr() % _PAGE // like.element_size()
    return flat[begin : begin + count].view(layers, heads, padded, width).narrow(2, 0, length)

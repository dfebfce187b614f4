"""Memory of texts that share what they hold, with tokens instead of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from tandem.inference.kv.extents import SequenceCache
from tandem.inference.kv.tables import Tables
from tests.support.laws.tables import PROMPT


class SharedMemory(Tables):
    """A pool of tokens instead of keys and values, in blocks of one position, in no order.

    Attributes:
        layers: tokens of the slots, by group of layers.
    """

    def __init__(self, capacity: int, groups: int = 1) -> None:
        super().__init__(capacity, 1)
        self.layers = [[-1] * capacity for _ in range(groups)]
        self._free = self._free[::2] + self._free[1::2]

    @property
    def tokens(self) -> list[int]:
        """In the last group, where a text is whole."""
        return self.layers[-1]

    def move(self, slots: Sequence[int], to: Sequence[int]) -> None:
        for layer in self.layers:
            for slot, token in zip(to, [layer[slot] for slot in slots], strict=True):
                layer[slot] = token

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=nullcontext())


def warm_cache(capacity: int, groups: int = 1) -> SequenceCache:
    """Of a text whose prompt was computed for another one, by every group of layers."""
    pool = SharedMemory(capacity + len(PROMPT), groups)
    other = pool.reserve(len(PROMPT))
    assert other is not None
    other.adopt(PROMPT, "")
    for token, slot in zip(PROMPT, other.slots(0, len(PROMPT)), strict=True):
        for layer in pool.layers:
            layer[slot] = token
    other.grow(PROMPT)
    other.publish(PROMPT, len(PROMPT))
    pool.release(other)
    cache = pool.reserve(capacity)
    assert cache is not None
    assert cache.adopt(PROMPT, "") == len(PROMPT) - 1
    return cache

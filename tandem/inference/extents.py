"""Extents of a pool of positions: who holds which part. Knows nothing of what is kept there."""

from __future__ import annotations

import bisect
import threading
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class SequenceCache:
    """One sequence's extent of the pool.

    Attributes:
        pool: whose part it is.
        start: first position in the pool.
        capacity: positions reserved.
        length: positions in use.
    """

    pool: Extents
    start: int
    capacity: int
    length: int = 0

    def rollback(self, length: int) -> None:
        """Forget all positions at or beyond `length`."""
        self.length = min(self.length, length)


class Extents:
    """Contiguous parts of a row of positions, that never overlap and merge again.

    Args:
        positions: that all sequences may hold together; rounded up to whole blocks.
        block: positions that can only be held together; extents begin and end with one.
    """

    def __init__(self, positions: int, block: int = 1) -> None:
        self.positions = _whole(positions, block)
        self._block = block
        self._lock = threading.Lock()
        self._free = [(0, self.positions)]  # (start, size), by start, never adjacent

    def reserve(self, capacity: int) -> SequenceCache | None:
        """An extent, the first that fits; None where no gap is large enough now."""
        capacity = _whole(capacity, self._block)
        with self._lock:
            for i, (start, size) in enumerate(self._free):
                if size >= capacity:
                    left = [(start + capacity, size - capacity)] if size > capacity else []
                    self._free[i : i + 1] = left
                    return SequenceCache(self, start, capacity)
        return None

    def release(self, cache: SequenceCache) -> None:
        """Give an extent back; whoever held it must not feed it any more."""
        with self._lock:
            i = bisect.bisect(self._free, (cache.start, 0))
            start, end = cache.start, cache.start + cache.capacity
            first = last = i
            if i > 0 and sum(self._free[i - 1]) == start:
                first, start = i - 1, self._free[i - 1][0]
            if i < len(self._free) and self._free[i][0] == end:
                last, end = i + 1, end + self._free[i][1]
            self._free[first:last] = [(start, end - start)]

    @property
    def free_positions(self) -> int:
        """Positions that no sequence has reserved."""
        with self._lock:
            return sum(size for _, size in self._free)


def _whole(positions: int, block: int) -> int:
    """Positions of as few blocks as hold these."""
    return -(-positions // block) * block

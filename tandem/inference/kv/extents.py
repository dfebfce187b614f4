"""Extents of a pool of positions: which sequence holds which part, whatever is stored there."""

from __future__ import annotations

import bisect
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tandem.inference.kv.branches import NO_BRANCHES, Branches


@dataclass(frozen=True, slots=True)
class Mark:
    """What a cache held at a time; see its attributes."""

    length: int
    branches: Branches
    branch_tokens: tuple[Any, ...]


@dataclass(eq=False, slots=True)
class SequenceCache:
    """One sequence's extent of the pool: its trunk, followed by branch rows.

    Attributes:
        pool: that the extent is part of.
        start: first position in the pool.
        capacity: reserved positions, including scratch for branch rows.
        length: of the trunk, in positions.
        branches: branch rows that were fed since the trunk last grew.
        branch_tokens: tokens of these rows, as they were fed: ids or `DrawnToken`.
    """

    pool: Extents
    start: int
    capacity: int
    length: int = 0
    branches: Branches = NO_BRANCHES
    branch_tokens: tuple[Any, ...] = ()

    def rollback(self, length: int) -> None:
        """Forget all positions at or beyond `length`, and all branch rows."""
        self.length = min(self.length, length)
        self._forget_branches()

    def branched(self, count: int, parents: Sequence[int]) -> tuple[int, Branches]:
        """The trunk's length and the branch rows as they would be after a feed with branches.

        Args:
            count: tokens of the feed; if some have no parent, they extend the trunk, and the old
                branch rows are forgotten.
            parents: of its last tokens.

        Raises:
            ValueError: a parent is no earlier row; or there are more parents than tokens.
        """
        new_tokens = count - len(parents)
        if new_tokens < 0:
            raise ValueError(f"{len(parents)} parents for {count} tokens")
        before = NO_BRANCHES if new_tokens else self.branches
        return self.length + new_tokens, before.grown(parents)

    def grow(self, token_ids: Sequence[Any], parents: Sequence[int] | None = None) -> None:
        """Add a feed's tokens; see `branched`."""
        if not parents:
            self.length += len(token_ids)
            self._forget_branches()
            return
        new = tuple(token_ids[-len(parents) :])
        old = self.branch_tokens if len(parents) == len(token_ids) else ()
        self.length, self.branches = self.branched(len(token_ids), parents)
        self.branch_tokens = (*old, *new)

    def keep(self, path: Sequence[int], behind: Sequence[int] = ()) -> None:
        """Extend the trunk by a path of branch rows, and forget all others but those named.

        The rows' keys and values are moved to the trunk's end. Rows that are already in place, as
        in a chain or a tree's first path, are not copied.

        Args:
            path: numbers of branch rows, each a child of the one before; may be empty.
            behind: further rows, ascending, that stay branch rows: each a child of the path's end
                or of an earlier one of them.

        Raises:
            ValueError: `path` is no such path, or `behind` does not hang at it.
        """
        self.branches.check_path(path)
        places = {path[-1] if path else 0: 0}
        parents: list[int] = []
        for number, row in enumerate(behind, 1):
            parent = self.branches.parents[row - 1]
            if parent not in places:
                raise ValueError(f"row {row} does not hang at the path")
            parents.append(places[parent])
            places[row] = number
        end, rows = self.start + self.length, [*path, *behind]
        in_place = 0
        while in_place < len(rows) and rows[in_place] == in_place + 1:
            in_place += 1
        if in_place < len(rows):
            self.pool.move([end + row - 1 for row in rows[in_place:]], end + in_place)
        self.length += len(path)
        self.branch_tokens = tuple(self.branch_tokens[row - 1] for row in behind)
        self.branches = NO_BRANCHES.grown(parents)

    def reopen(self, length: int, token_ids: Sequence[Any]) -> None:
        """Turn the trunk's positions from `length` on into branch rows in a line, before those that
        there are. All stays in its place.

        Args:
            length: of the trunk that is left.
            token_ids: of the positions that become rows.
        """
        count = self.length - length
        parents = (*range(count), *(parent + count for parent in self.branches.parents))
        self.length, self.branches = length, NO_BRANCHES.grown(parents)
        self.branch_tokens = (*token_ids, *self.branch_tokens)

    def mark(self) -> Mark:
        """How far it is, to come back to."""
        return Mark(self.length, self.branches, self.branch_tokens)

    def return_to(self, mark: Mark) -> None:
        """Forget all that was fed since a mark. Nothing may have been kept or rolled back since."""
        self.length, self.branches, self.branch_tokens = (
            mark.length,
            mark.branches,
            mark.branch_tokens,
        )

    def adopt(self, token_ids: Sequence[int]) -> int:
        """Positions of a prompt's beginning that are there already, computed for other sequences;
        only before the first feed. The prompt's last token is never one. Extents are not shared.
        """
        return 0

    def _forget_branches(self) -> None:
        self.branches, self.branch_tokens = NO_BRANCHES, ()


class Extents(ABC):
    """Contiguous parts of a range of positions. They never overlap; freed neighbours merge again.

    Args:
        positions: that all sequences may hold together; rounded up to whole blocks.
        block: positions that can only be held together; an extent is a number of whole blocks.
    """

    def __init__(self, positions: int, block: int = 1) -> None:
        self.positions = _whole(positions, block)
        self._block = block
        self._lock = threading.Lock()
        self._free = [(0, self.positions)]  # (start, size), by start, never adjacent

    def reserve(self, capacity: int) -> SequenceCache | None:
        """An extent in the first gap that fits; None if no gap is large enough now."""
        capacity = _whole(capacity, self._block)
        with self._lock:
            for i, (start, size) in enumerate(self._free):
                if size >= capacity:
                    left = [(start + capacity, size - capacity)] if size > capacity else []
                    self._free[i : i + 1] = left
                    return SequenceCache(self, start, capacity)
        return None

    def release(self, cache: SequenceCache) -> None:
        """Give an extent back; it must not be fed any more."""
        with self._lock:
            i = bisect.bisect(self._free, (cache.start, 0))
            start, end = cache.start, cache.start + cache.capacity
            first = last = i
            if i > 0 and sum(self._free[i - 1]) == start:
                first, start = i - 1, self._free[i - 1][0]
            if i < len(self._free) and self._free[i][0] == end:
                last, end = i + 1, end + self._free[i][1]
            self._free[first:last] = [(start, end - start)]

    @abstractmethod
    def move(self, slots: Sequence[int], first: int) -> None:
        """Copy the content of `slots`, in all layers, to the slots from `first` on. If the two
        overlap, the content from before the call is copied."""

    @property
    def free_positions(self) -> int:
        """Positions that no sequence has reserved."""
        with self._lock:
            return sum(size for _, size in self._free)


def _whole(positions: int, block: int) -> int:
    """Positions, rounded up to whole blocks."""
    return -(-positions // block) * block

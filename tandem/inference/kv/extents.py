"""Which sequence holds which part of a pool of positions, whatever is stored there."""

from __future__ import annotations

import bisect
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from tandem.inference.kv.blocks import Block, Blocks
from tandem.inference.kv.branches import NO_BRANCHES, Branches

# Positions that an extent grows by, if no more are needed.
_MOST_AMPLE = 256
# Blocks that are copied at a time: meanwhile no sequence is admitted.
_COPIED = 16


@dataclass(frozen=True, slots=True)
class Mark:
    """What a cache held at a time; see its attributes."""

    length: int
    branches: Branches
    branch_tokens: tuple[Any, ...]


@dataclass(eq=False, slots=True)
class SequenceCache:
    """One sequence's part of the pool: its trunk, followed by branch rows.

    Attributes:
        pool: that it is part of.
        start: first slot of its extent; 0 where it has a table.
        capacity: positions that it holds, including scratch for branch rows.
        length: of the trunk, in positions.
        branches: branch rows that were fed since the trunk last grew.
        branch_tokens: tokens of these rows, as they were fed: ids or `DrawnToken`.
        table: numbers of its blocks of the pool, in order; None where it has an extent.
        promised: positions that it may grow to, see `PositionPool.grow`; at least its capacity.
        salt: of the texts with which it shares its prefix; None shares nothing.
        looked_up: tokens of its prompt that were looked for.
        found: of these, the first ones, that were computed before it opened.
        blocks: the full ones at its beginning that others may find. Nothing is written there.
        skipped: positions of its text that it does not hold, of those before its last ones.
    """

    pool: PositionPool
    start: int
    capacity: int
    length: int = 0
    branches: Branches = NO_BRANCHES
    branch_tokens: tuple[Any, ...] = ()
    table: list[int] | None = None
    promised: int = 0
    salt: str | None = None
    looked_up: int = 0
    found: int = 0
    blocks: list[Block] = field(default_factory=list)
    skipped: int = 0

    def __post_init__(self) -> None:
        self.promised = max(self.promised, self.capacity)

    @property
    def used(self) -> int:
        """Positions in use: of the trunk, and of branch rows."""
        return self.length + len(self.branches)

    @property
    def weights_version(self) -> int:
        """Of the weights that compute it, from its beginning to its end."""
        return 0 if self.pool is None else self.pool.blocks.version

    def slots(self, first: int, count: int) -> Sequence[int]:
        """Where its positions from `first` on are in the pool."""
        if self.table is None:
            return range(self.start + first, self.start + first + count)
        size, table = self.pool.blocks.size, self.table
        return [table[at // size] * size + at % size for at in range(first, first + count)]

    def rollback(self, length: int) -> None:
        """Forget all positions at or beyond `length`, and all branch rows.

        Raises:
            ValueError: others may find some of these positions.
        """
        self._check_private(length)
        self.length = min(self.length, length)
        self._forget_branches()

    def keep_text(self, agreed: int, text: int) -> int:
        """Forget all that differs from a text, and its last token, which is to be computed again.

        Args:
            agreed: first positions that agree with the text.
            text: its tokens.

        Returns:
            Positions that are held now.
        """
        kept = min(agreed, text - 1)
        self.rollback(kept)
        return kept

    def note(self, nodes: Mapping[int, int]) -> None:
        """Learn the branch rows of a draft's nodes that were computed, for one who reads them."""

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
        rows, in_place = [*path, *behind], 0
        while in_place < len(rows) and rows[in_place] == in_place + 1:
            in_place += 1
        if in_place < len(rows):
            slots = self.slots(self.length, len(self.branches))
            to = slots[in_place : len(rows)]
            self.pool.move([slots[row - 1] for row in rows[in_place:]], to)
        self.length += len(path)
        self.branch_tokens = tuple(self.branch_tokens[row - 1] for row in behind)
        self.branches = NO_BRANCHES.grown(parents)

    def reopen(self, length: int, token_ids: Sequence[Any]) -> None:
        """Turn the trunk's positions from `length` on into branch rows in a line, before those that
        there are. All stays in its place.

        Args:
            length: of the trunk that is left.
            token_ids: of the positions that become rows.

        Raises:
            ValueError: others may find some of these positions.
        """
        self._check_private(length)
        count = self.length - length
        parents = (*range(count), *(parent + count for parent in self.branches.parents))
        self.length, self.branches = length, NO_BRANCHES.grown(parents)
        self.branch_tokens = (*token_ids, *self.branch_tokens)

    def without_branches(self) -> SequenceCache:
        """The same trunk, with no branch rows."""
        return replace(self, branches=NO_BRANCHES, branch_tokens=())

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

    def adopt(self, token_ids: Sequence[int], salt: str | None) -> int:
        """Take over what is computed of a prompt's beginning; only before the first feed.

        Args:
            token_ids: of the prompt; the last one is not looked for.
            salt: see the attributes. Without a call nothing is shared.

        Returns:
            Positions that were found, and need not be fed.
        """
        self.salt = salt
        if salt is not None:
            self.looked_up = len(token_ids)
            # A text that opens late may have outgrown what it holds.
            self.pool.adopt(self, token_ids[: self.capacity + 1], salt)
        self.found = self.length
        return self.found

    def publish(self, token_ids: Sequence[int], end: int) -> None:
        """Let others find the full blocks of a text's beginning, as far as they are computed.

        Args:
            token_ids: of the text, from its beginning on.
            end: tokens of these that will not be taken back.
        """
        end = min(end, self.length)
        if self.salt is not None and end // self.pool.blocks.size > len(self.blocks):
            self.pool.publish(self, token_ids, end, self.salt)

    def _check_private(self, length: int) -> None:
        if self.blocks and length < len(self.blocks) * self.pool.blocks.size:
            raise ValueError(f"positions from {length} on are shared")

    def _forget_branches(self) -> None:
        self.branches, self.branch_tokens = NO_BRANCHES, ()


class PositionPool(ABC):
    """A range of positions that sequences hold parts of. Any thread may call it.

    Attributes:
        positions: that all sequences may hold together.
        blocks: those of its blocks that hold prefixes which can be found.

    Args:
        positions: see above.
        block: positions of a block.
    """

    def __init__(self, positions: int, block: int) -> None:
        self.positions = positions
        self.blocks = Blocks(block)
        self._lock = threading.Lock()

    @abstractmethod
    def reserve(self, capacity: int, held: int | None = None) -> SequenceCache | None:
        """A sequence's part; None if there is no room now. What no sequence uses yields, the part
        that was used longest ago first.

        Args:
            capacity: positions that it may grow to.
            held: of these, that it holds from the start; None for all, so that it never has to
                `grow`.
        """

    @abstractmethod
    def grow(self, cache: SequenceCache, capacity: int) -> bool:
        """Have a part hold at least this many positions, at most what it was promised; False if
        there is no room for them now. It must not be in a batch."""

    @abstractmethod
    def release(self, cache: SequenceCache) -> None:
        """Give a part back; it must not be fed any more. What others may find in it is kept."""

    @abstractmethod
    def adopt(self, cache: SequenceCache, token_ids: Sequence[int], salt: str) -> None:
        """See `SequenceCache.adopt`; the cache's length is what was found."""

    def publish(self, cache: SequenceCache, token_ids: Sequence[int], end: int, salt: str) -> None:
        """See `SequenceCache.publish`."""
        size, own = self.blocks.size, cache.blocks
        with self._lock:
            for first in range(len(own) * size, end - size + 1, size):
                tokens, place = token_ids[first : first + size], self._place(cache, first)
                block, replaced = self.blocks.add(own, tokens, salt, place)
                own.append(block)
                if replaced is not None:
                    self._free_block(replaced.place)

    def forget(self) -> int:
        """Let no prefix be found that is computed by now; positions that only prefixes held."""
        with self._lock:
            kept = self.blocks.forget()
            for block in kept:
                self._free_block(block.place)
        return len(kept) * self.blocks.size

    @abstractmethod
    def move(self, slots: Sequence[int], to: Sequence[int]) -> None:
        """Copy the content of slots, in all layers, to as many others, which follow each other in a
        sequence. If the two overlap, the content from before the call is copied."""

    @property
    def free_positions(self) -> int:
        """Positions that no sequence has reserved, kept ones among them."""
        with self._lock:
            return self._empty() + self.blocks.num_kept * self.blocks.size

    @property
    def kept_positions(self) -> int:
        """Positions that no sequence has reserved, and whose prefixes can be found."""
        with self._lock:
            return self.blocks.num_kept * self.blocks.size

    @property
    @abstractmethod
    def longest_free(self) -> int:
        """Positions of the largest part that could be reserved now."""

    @abstractmethod
    def _empty(self) -> int:
        """Positions that no sequence has, and that hold nothing."""

    @abstractmethod
    def _place(self, cache: SequenceCache, first: int) -> int:
        """The place of a sequence's block, as `_free_block` takes it."""

    @abstractmethod
    def _free_block(self, place: int) -> None:
        """The block at a place holds nothing any more."""


class Extents(PositionPool):
    """Contiguous parts of a range of positions. They never overlap; freed neighbours merge again.

    Attention reads an extent in place, so a prefix that is found is copied into it, and a sequence
    that outgrows its extent is moved into a larger one.

    Args:
        positions: that all sequences may hold together.
        block: positions of a block.
    """

    def __init__(self, positions: int, block: int = 16) -> None:
        super().__init__(positions, block)
        self._free = [(0, positions)]  # (start, size), by start, never adjacent

    def reserve(self, capacity: int, held: int | None = None) -> SequenceCache | None:
        """See `PositionPool`: an extent in the first gap that fits."""
        held = capacity if held is None else min(held, capacity)
        with self._lock:
            start = self._found(held)
        return None if start is None else SequenceCache(self, start, held, promised=capacity)

    def grow(self, cache: SequenceCache, capacity: int) -> bool:
        """See `PositionPool`: into the gap after its extent, else into a larger one elsewhere; by
        half if that is free, so that a text is not moved again and again."""
        further = min(cache.capacity // 2, _MOST_AMPLE)
        ample = min(max(capacity, cache.capacity + further), cache.promised)
        with self._lock:
            return (
                self._extend(cache, ample)
                or self._extend(cache, capacity)
                or self._move_to_larger(cache, ample, self._start_of)
                or self._move_to_larger(cache, capacity, self._found)
            )

    def _extend(self, cache: SequenceCache, capacity: int) -> bool:
        """Take the positions after an extent, if they are free."""
        end, more = cache.start + cache.capacity, capacity - cache.capacity
        i = bisect.bisect(self._free, (end, 0))
        if i == len(self._free) or self._free[i][0] != end or self._free[i][1] < more:
            return False
        self._take(end, more)
        cache.capacity = capacity
        return True

    def _move_to_larger(
        self, cache: SequenceCache, capacity: int, take: Callable[[int], int | None]
    ) -> bool:
        """Move a sequence into an extent of this size, which may have its own one in it.

        Args:
            cache: the sequence's.
            capacity: the size.
            take: takes an extent of a size, if there is one.
        """
        before, held = cache.start, cache.capacity
        self._give(before, held)
        start = take(capacity)
        if start is None:
            self._take(before, held)
            return False
        try:
            if (used := cache.used) and start != before:
                self.move(range(before, before + used), range(start, start + used))
        except BaseException:  # a device's memory is out: the text stays where it is
            self._give(start, capacity)
            self._take(before, held)
            raise
        for block in cache.blocks:  # others copy them, and so no other sequence holds them
            block.place += start - before
        cache.start, cache.capacity = start, capacity
        return True

    def _take(self, start: int, size: int) -> None:
        """Take positions that are in one gap."""
        i = bisect.bisect(self._free, (start, self.positions)) - 1
        first, end = self._free[i][0], sum(self._free[i])
        parts = (first, start - first), (start + size, end - start - size)
        self._free[i : i + 1] = [part for part in parts if part[1]]

    def _found(self, size: int) -> int | None:
        """Take the first gap that fits, or the first one that what is kept leaves when it yields;
        None if there is none."""
        start = self._start_of(size)
        if start is None and self._largest() >= size:
            while start is None:
                self._free_block(self.blocks.evict().place)
                start = self._start_of(size)
        return start

    def release(self, cache: SequenceCache) -> None:
        """See `PositionPool`."""
        shared = len(cache.blocks) * self.blocks.size
        with self._lock:
            for block in reversed(cache.blocks):
                if self.blocks.leave(block):
                    self._free_block(block.place)
            if shared < cache.capacity:
                self._give(cache.start + shared, cache.capacity - shared)

    def adopt(self, cache: SequenceCache, token_ids: Sequence[int], salt: str) -> None:
        """See `PositionPool`. Copied in pieces: a block may be forgotten between two of them."""
        found = self.blocks.along(token_ids, salt)
        whole = _COPIED
        while whole == _COPIED:
            with self._lock:
                piece = list(islice(found, _COPIED))
                size, whole = self.blocks.size, len(piece)
                slots = [slot for one in piece for slot in range(one.place, one.place + size)]
                if slots:
                    self.move(slots, cache.slots(cache.length, len(slots)))
                    cache.length += len(slots)

    @property
    def longest_free(self) -> int:
        """See `PositionPool`."""
        with self._lock:
            return self._largest()

    def _start_of(self, capacity: int) -> int | None:
        """Take the first gap that fits; None if none does."""
        for i, (start, size) in enumerate(self._free):
            if size >= capacity:
                left = [(start + capacity, size - capacity)] if size > capacity else []
                self._free[i : i + 1] = left
                return start
        return None

    def _largest(self) -> int:
        """Positions of the largest gap if nothing were kept."""
        size = self.blocks.size
        largest = begins = ends = 0
        for start, length in sorted((*self._free, *((b.place, size) for b in self.blocks.kept))):
            if start != ends:
                begins = start
            ends = start + length
            largest = max(largest, ends - begins)
        return largest

    def _empty(self) -> int:
        return sum(size for _, size in self._free)

    def _place(self, cache: SequenceCache, first: int) -> int:
        return cache.start + first

    def _free_block(self, place: int) -> None:
        self._give(place, self.blocks.size)

    def _give(self, start: int, size: int) -> None:
        """Add positions to the gaps."""
        end = start + size
        first = last = i = bisect.bisect(self._free, (start, 0))
        if i > 0 and sum(self._free[i - 1]) == start:
            first, start = i - 1, self._free[i - 1][0]
        if i < len(self._free) and self._free[i][0] == end:
            last, end = i + 1, sum(self._free[i])
        self._free[first:last] = [(start, end - start)]

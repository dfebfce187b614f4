"""Parts of a pool that are tables of blocks, in any order: sequences share blocks in place."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.inference.kv.extents import PositionPool, SequenceCache


class Tables(PositionPool):
    """Blocks of a pool; a sequence's are numbered by its table.

    Args:
        positions: that all sequences may hold together; rounded up to whole blocks.
        block: positions of a block.
    """

    def __init__(self, positions: int, block: int) -> None:
        count = -(-positions // block)
        super().__init__(count * block, block)
        self._free = list(range(count))[::-1]

    def reserve(self, capacity: int, held: int | None = None) -> SequenceCache | None:
        """See `PositionPool`."""
        size = self.blocks.size
        held = capacity if held is None else min(held, capacity)
        with self._lock:
            table = self._taken(-(-held // size))
        if table is None:
            return None
        promised = -(-capacity // size) * size
        return SequenceCache(self, 0, len(table) * size, table=table, promised=promised)

    def grow(self, cache: SequenceCache, capacity: int) -> bool:
        """See `PositionPool`."""
        table, size = _table_of(cache), self.blocks.size
        with self._lock:
            more = self._taken(max(-(-capacity // size) - len(table), 0))
            if more is None:
                return False
            table += more
            cache.capacity = len(table) * size
        return True

    def _taken(self, count: int) -> list[int] | None:
        """Free blocks; None if there are too few, those that are kept among them."""
        if count > len(self._free) + self.blocks.num_kept:
            return None
        while len(self._free) < count:
            self._free.append(self.blocks.evict().place)
        return [self._free.pop() for _ in range(count)]

    def release(self, cache: SequenceCache) -> None:
        """See `PositionPool`."""
        table, own = _table_of(cache), cache.blocks
        with self._lock:
            self._free += reversed(table[len(own) :])
            for block in reversed(own):
                if self.blocks.leave(block):
                    self._free.append(block.place)

    def adopt(self, cache: SequenceCache, token_ids: Sequence[int], salt: str) -> None:
        """See `PositionPool`. As many of the reserved blocks are free again."""
        table, own = _table_of(cache), cache.blocks
        with self._lock:
            own += self.blocks.along(token_ids, salt)
            for block in own:
                self.blocks.use(block)
            rest = len(table) - len(own)
            self._free += reversed(table[rest:])
            table[:] = [*(block.place for block in own), *table[:rest]]
            cache.length = len(own) * self.blocks.size

    @property
    def longest_free(self) -> int:
        """See `PositionPool`: blocks are in any order."""
        return self.free_positions

    def _empty(self) -> int:
        return len(self._free) * self.blocks.size

    def _place(self, cache: SequenceCache, first: int) -> int:
        return _table_of(cache)[first // self.blocks.size]

    def _free_block(self, place: int) -> None:
        self._free.append(place)


def _table_of(cache: SequenceCache) -> list[int]:
    assert cache.table is not None
    return cache.table

"""A decoder that sees the first and the latest keys of a text, and holds no others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tandem.inference.decoder import Decoder
from tandem.inference.feed import Feed
from tandem.inference.kv.extents import SequenceCache
from tandem.inference.kv.sparse_keys import SparseKeys
from tandem.inference.output import PassOutput
from tandem.inference.views.of_decoder import OfDecoder
from tandem.speculation.tree import LONGEST_DRAFT

# Keys beyond the window's size until the oldest are left out. They are seen meanwhile.
_FURTHER = 256


class WindowCache(SequenceCache):
    """The first keys of a text, and its latest. Lengths that are asked for are the text's; `length`
    counts slots."""

    __slots__ = ("_first",)

    def rollback(self, length: int) -> None:
        """See `SequenceCache.rollback`.

        Raises:
            ValueError: keys would be missing that were left out.
        """
        if self.skipped and length < self.skipped + self._first:
            raise ValueError(f"keys from {length} on were left out")
        super().rollback(length - self.skipped)

    def adopt(self, token_ids: Sequence[int], salt: str | None) -> int:
        """Nothing is shared: what a key was computed of hangs on what was left out before it."""
        return 0

    def leave_out(self, first: int, latest: int) -> None:
        """Hold the first keys and the latest alone."""
        more = self.length - first - latest
        if more <= 0:
            return
        self._first = first
        slots = self.slots(0, self.length)
        self.pool.move(slots[first + more :], slots[first : first + latest])
        self.length -= more
        self.skipped += more


def window_of(keys: SparseKeys) -> int:
    """Positions of a KV cache that a sequence takes."""
    # What a draft takes back is among the latest.
    return keys.sink + max(keys.budget - keys.sink, 2 * LONGEST_DRAFT) + _FURTHER


class WindowedDecoder(OfDecoder):
    """A small decoder after texts that are longer than it is worth to hold (StreamingLLM, Xiao et
    al., arXiv 2309.17453).

    Keys keep the positions that they were rotated for, other than in the paper.

    Args:
        decoder: of chains.
        keys: a window.
    """

    def __init__(self, decoder: Decoder, keys: SparseKeys) -> None:
        super().__init__(decoder, "window", keys)
        self._first, self._latest = keys.sink, window_of(keys) - keys.sink - _FURTHER
        self.improving = decoder.improving

    @property
    def takes_trees(self) -> bool:
        """Chains alone."""
        return False

    def reserve(self, capacity: int, nodes: int = 0, held: int | None = None) -> WindowCache | None:
        """Room for a sequence's window, however long the text is; None if there is none now."""
        part = self._decoder.reserve(self._first + self._latest + _FURTHER)
        if part is None:
            return None
        return WindowCache(
            part.pool, part.start, part.capacity, table=part.table, promised=part.promised
        )

    def release(self, cache: WindowCache) -> None:
        """See `Model`."""
        self._decoder.release(cache)

    def forward(self, feeds: Sequence[Feed]) -> PassOutput:
        """See `Model`; more tokens than have room go through it in pieces."""
        rest = list(feeds)
        while long := [i for i, feed in enumerate(rest) if len(feed.token_ids) > _FURTHER]:
            pieces = []
            for i in long:
                tokens: Any = rest[i].token_ids
                pieces.append(replace(rest[i], token_ids=tokens[:_FURTHER], rows=0))
                rest[i] = replace(rest[i], token_ids=tokens[_FURTHER:])
            self._forward(pieces)
        return self._forward(rest)

    def _forward(self, feeds: Sequence[Feed]) -> PassOutput:
        for feed in feeds:
            cache: Any = feed.cache
            if cache.length + len(feed.token_ids) > cache.capacity:
                cache.leave_out(self._first, self._latest)
        self.forward_passes += 1
        self.fed_tokens += sum(len(feed.token_ids) for feed in feeds)
        return self._decoder.forward(feeds)

    def measure(self, longest: int) -> None:
        """See `Model`."""
        if not self._decoder.pass_times:
            self._decoder.measure(min(longest, self._first + self._latest))
        self.pass_times = self._decoder.pass_times

    def improve(self) -> None:
        """See `Model`."""
        self._decoder.improve()
        self.pass_times = self._decoder.pass_times
        self.improving = False

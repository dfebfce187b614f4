"""A ragged batch, packed: the new tokens of many sequences in one row, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tandem.inference.feed import Drawn, Draws, Feed
from tandem.inference.tiles import Tiles


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's part of a batch.

    Attributes:
        first: its first row of the batch.
        count: its new tokens.
        start: of its extent of the pool.
        length: its positions in use, the new ones included.
    """

    first: int
    count: int
    start: int
    length: int


@dataclass(slots=True)
class Packing:
    """Where the feeds of a batch go, as the host knows it.

    Attributes:
        segments: one a sequence, in the order of the rows.
        positions: of each token in its own sequence.
        places: of each token in the pool.
        rows: of the batch whose logits are wanted.
    """

    segments: list[Segment]
    positions: list[int]
    places: list[int]
    rows: list[int]

    @classmethod
    def of(cls, feeds: Sequence[Feed]) -> Packing:
        """Pack feeds of different sequences.

        Raises:
            ValueError: a sequence would write into its neighbour's extent.
        """
        packing = cls([], [], [], [])
        first = 0
        for feed in feeds:
            cache, count = feed.cache, len(feed.token_ids)
            length = cache.length + count
            if length > cache.capacity:
                raise ValueError(f"{length} tokens do not fit an extent of {cache.capacity}")
            packing.segments.append(Segment(first, count, cache.start, length))
            packing.positions.extend(range(cache.length, length))
            packing.places.extend(range(cache.start + cache.length, cache.start + length))
            first += count
            packing.rows.extend(range(first - feed.rows, first))
        return packing

    def wanted(self, device: torch.device) -> Tensor | None:
        """`rows` on the device; None where they are all."""
        if len(self.rows) == len(self.positions):
            return None
        return torch.tensor(self.rows, dtype=torch.int64).to(device, non_blocking=True)


@dataclass(slots=True)
class PackedBatch:
    """Everything that a forward pass is given.

    Attributes:
        segments: one a sequence, in the order of the rows.
        token_ids: [1, T] int64.
        positions: [1, T] int64, of each token in its own sequence.
        places: [T] int64, of each token in the pool.
        rows: [R] int64, rows of the batch whose logits are wanted; None for all.
        tiles: for attention in one call; None for one call a sequence.
    """

    segments: list[Segment]
    token_ids: Tensor
    positions: Tensor
    places: Tensor
    rows: Tensor | None
    tiles: Tiles | None = None
    _masks: dict[tuple[int, int | None, int], Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls, feeds: Sequence[Feed], device: torch.device, in_one_call: bool = False
    ) -> PackedBatch:
        """Pack feeds of different sequences."""
        packing = Packing.of(feeds)
        segments = packing.segments
        numbers = torch.tensor([packing.positions, packing.places], dtype=torch.int64)
        numbers = numbers.to(device, non_blocking=True)
        # One sequence alone is one call anyway, by a kernel that needs no tiles.
        tiles = Tiles(segments, device) if in_one_call and len(segments) > 1 else None
        token_ids = tokens_of(feeds, device)[None]
        return cls(segments, token_ids, numbers[:1], numbers[1], packing.wanted(device), tiles)

    def mask(
        self, count: int, seen: int, window: int | None, groups: int, like: Tensor
    ) -> Tensor | None:
        """What a sequence's new tokens may not look at, as an additive mask.

        Args:
            count: new tokens.
            seen: keys at hand, the last of the sequence's positions.
            window: positions that a token sees, its own included; None for all.
            groups: query heads that share a key head; each token has a row for each.
            like: dtype and device.

        Returns:
            [groups * count, seen] of 0 and -inf; None where everything may be seen.
        """
        if count == 1 and (window is None or window >= seen):
            return None
        # Seen from the end, masks of one count are alike: the longest one has the others in it.
        key = (count, window, groups)
        mask = self._masks.get(key)
        if mask is None:
            longest = max(segment.length for segment in self.segments)
            queries = torch.arange(longest - count, longest, device=like.device)[:, None]
            keys = torch.arange(longest, device=like.device)
            hidden = (keys > queries) | (keys <= queries - (window or longest))
            mask = torch.zeros(count, longest, dtype=like.dtype, device=like.device)
            mask = self._masks[key] = mask.masked_fill(hidden, -torch.inf).repeat(groups, 1)
        part = mask[:, mask.shape[1] - seen :]
        # A device's kernels want a mask that begins where they can load it from.
        return part.contiguous() if part.is_cuda else part


def tokens_of(feeds: Sequence[Feed], device: torch.device) -> Tensor:
    """[T] token ids of all feeds; those on the host travel together."""
    known: list[int] = []
    drawn: dict[int, tuple[Draws, list[int], list[int]]] = {}
    for feed in feeds:
        if isinstance(feed.token_ids, Drawn):
            draws, places, indices = drawn.setdefault(
                id(feed.token_ids.draws), (feed.token_ids.draws, [], [])
            )
            places.append(len(known))
            indices.append(feed.token_ids.index)
            known.append(0)
        else:
            known += feed.token_ids
    if len(drawn) == 1:
        ((draws, places, indices),) = drawn.values()
        if indices == list(range(len(draws.tokens))) and len(known) == len(indices):
            return draws.tokens
    token_ids = torch.tensor(known, dtype=torch.int64).to(device, non_blocking=True)
    for draws, places, indices in drawn.values():
        chosen = torch.tensor((places, indices), dtype=torch.int64).to(device, non_blocking=True)
        token_ids.index_copy_(0, chosen[0], draws.tokens.index_select(0, chosen[1]))
    return token_ids

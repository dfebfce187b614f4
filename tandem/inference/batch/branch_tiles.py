"""Tiles of a batch in which some texts have branches: what a row sees is a range of its trunk, and
its ancestors behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from tandem.inference.batch.tiles import Sent, Tiles, block_mask

if TYPE_CHECKING:
    from tandem.inference.batch.packed import Segment


class BranchTiles(Tiles):
    """See `Tiles`; chains beside the trees see what they see there."""

    def _lay(self, segments: Sequence[Segment]) -> tuple[np.ndarray, np.ndarray]:
        self._segments = segments
        self._rows, places = super()._lay(segments)
        return self._rows, places

    def _make(self, window: int | None, positions: int) -> BlockMask:
        first, last, base, ancestors = self._look_behind(window)
        width = ancestors.shape[-1]
        low = np.where(self._last < 0, positions, first).min(1)
        numbers = (first, last, base, ancestors, *self._blocks(low))
        sent = self._seen[window] = Sent(self._device, np.int32, *numbers)
        sees_from, sees_to, behind, table, indices, counts = sent.views
        # A number of Python would be a symbol to the compiler, which it cannot place here.
        columns = torch.full((), width, dtype=torch.int32, device=self._device)

        def sees(_b: Tensor, _h: Tensor, place: Tensor, position: Tensor) -> Tensor:
            column = position - behind[place]
            inside = (column >= 0) & (column < columns)
            ancestor = table[place * columns + torch.where(inside, column, 0)] > 0
            in_trunk = (position >= sees_from[place]) & (position <= sees_to[place])
            return in_trunk | (inside & ancestor)

        return block_mask(self.size, indices, counts, numbers[4].shape, sees, positions)

    def _look_behind(self, window: int | None) -> tuple[np.ndarray, ...]:
        """What places see: first and last of a trunk, [tiles, size] each; where the rows behind it
        begin, and which of these [tiles, size, W]."""
        seen = [_seen_by(segment, window) for segment in self._segments]
        width = max(ancestors.shape[1] for _, _, _, ancestors in seen)
        padded = [np.pad(sees, ((0, 0), (0, width - sees.shape[1]))) for *_, sees in seen]
        used = self._last >= 0
        first, last, base = (
            np.concatenate([each[i] for each in seen])[self._rows] for i in range(3)
        )
        ancestors = np.concatenate(padded)[self._rows] & used[..., None]
        return np.where(used, first, 0), np.where(used, last, -1), base, ancestors


def _seen_by(segment: Segment, window: int | None) -> tuple[np.ndarray, ...]:
    """What each new row of a sequence sees, in places of the pool: the first and the last of the
    trunk, where the rows behind it begin, and which of these [count, W]."""
    count, end = segment.count, segment.start + segment.length
    if segment.branches is None:
        positions = np.arange(segment.length - count, segment.length)
        sees = np.zeros((count, 1), bool)
        base, last = np.full(count, end), segment.start + positions
    else:
        rows, sees = segment.behind
        positions = rows[-count:]
        base = np.full(count, end - len(rows))
        last = base - 1
        if window is not None:
            sees &= rows > positions[:, None] - window
    first = np.full(count, segment.start)
    if window is not None:
        first += np.maximum(0, positions - window + 1)
    return first, last, base, sees

"""A ragged batch in tiles of rows, each of one text, for one call of attention a layer.

What a tile sees is one range of the pool, since an extent is contiguous. So the table of the
blocks that a kernel has to read is arithmetic on the host, and nothing is asked of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

if TYPE_CHECKING:
    from tandem.inference.batch import Segment

# Positions of the pool that a kernel reads together; extents begin with such a block, so that
# no text's tile reads what another text holds.
BLOCK = 64
# Rows of a tile: as few as a tensor core takes, for drafts and verifications; more for prompts.
FEW, MANY = 16, 64


class Tiles:
    """The rows of a batch, each text's filled up to whole tiles, and what they see.

    Args:
        segments: at least two.
        device: where rows and masks go.

    Attributes:
        size: rows of a tile.
        rows: [N] int64, the row of the batch at each of the N places; any for one without.
        places: [T] int64, where each row of the batch is.
    """

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        first, count, start, length = np.array(
            [(one.first, one.count, one.start, one.length) for one in segments]
        ).T
        self.size = FEW if count.max() <= FEW else MANY
        tiles = -(-count // self.size)
        text = np.repeat(np.arange(len(segments)), tiles)
        # [tiles, size], of each place in its text's new tokens.
        nth = np.arange(len(text)) - np.repeat(tiles.cumsum() - tiles, tiles)
        nth = nth[:, None] * self.size + np.arange(self.size)
        self._used = nth < count[text][:, None]
        self._start = start[text][:, None]
        # The last position of the pool that a row sees, its own; a place without one sees none.
        self._last = np.where(self._used, (start + length - count)[text][:, None] + nth, -1)
        rows = np.where(self._used, first[text][:, None] + nth, 0)
        self.rows, self.places = _sent(device, np.int64, rows, np.flatnonzero(self._used))
        self._device = device
        self._masks: dict[int | None, BlockMask] = {}
        self._caps: dict[float, Callable[..., Tensor]] = {}

    def mask(self, window: int | None, positions: int) -> BlockMask:
        """What the places see, shared by all layers of a window.

        Args:
            window: positions that a token sees, its own included; None for all.
            positions: of the pool.
        """
        mask = self._masks.get(window)
        if mask is None:
            mask = self._masks[window] = self._make(window, positions)
        return mask

    def cap(self, softcap: float) -> Callable[..., Tensor]:
        """What bounds a score as softcap * tanh(score / softcap), shared by all layers."""
        capped = self._caps.get(softcap)
        if capped is None:
            # A number of Python would be a symbol to the compiler, which it cannot place here.
            bound = torch.full((), softcap, dtype=torch.float32, device=self._device)

            def capped(score: Tensor, *_: Tensor) -> Tensor:
                return bound * torch.tanh(score / bound)

            self._caps[softcap] = capped
        return capped

    def _make(self, window: int | None, positions: int) -> BlockMask:
        first = np.broadcast_to(self._start, self._last.shape)
        if window is not None:
            first = np.maximum(first, self._last - window + 1)
        low, high = first[:, 0] // BLOCK, self._last.max(1) // BLOCK
        counts = high - low + 1
        # In fours: a size of 1 would be compiled apart, and numbers behind it begin where a kernel
        # can load them from. What lies beyond a tile's count is not read.
        nth = np.arange(-(-counts.max() // 4) * 4)
        blocks = np.minimum(low[:, None] + nth, high[:, None])
        sees_from, sees_to, indices, numbers = _sent(
            self._device, np.int32, first, self._last, blocks, counts
        )

        def sees(_b: Tensor, _h: Tensor, place: Tensor, position: Tensor) -> Tensor:
            return (position >= sees_from[place]) & (position <= sees_to[place])

        return BlockMask.from_kv_blocks(
            numbers[None, None],
            indices.view(1, 1, *blocks.shape),
            BLOCK_SIZE=(self.size, BLOCK),
            mask_mod=sees,
            seq_lengths=(self._last.size, positions),
            compute_q_blocks=False,
        )


def _sent(device: torch.device, kind: type[np.integer], *arrays: np.ndarray) -> list[Tensor]:
    """The arrays on the device, flat, in one transfer that nobody waits for."""
    flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]).astype(kind))
    sent = flat.to(device, non_blocking=True)
    ends = np.cumsum([array.size for array in arrays]).tolist()
    return [sent[end - array.size : end] for end, array in zip(ends, arrays, strict=True)]

"""A ragged batch in tiles of rows, each of one text, for one call of attention per layer.

A row sees a range of its text's trunk, and of the rows behind the trunk those of its own path.
The trunk's range is two slots of the pool, since an extent is contiguous; the rows behind it are
bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tandem.inference.kernels.attention import COUNTED, WORD

if TYPE_CHECKING:
    from tandem.inference.batch.segment import Segment


# Rows of a tile: for plain decoding and the steps of a draft; for verifications; for prompts.
ONE, FEW, MANY = 4, 16, 64


@dataclass(frozen=True, slots=True)
class TileSizes:
    """Sizes to which a batch is padded, so that it fits a captured pass.

    Attributes:
        rows: of the batch.
        tiles: of the batch.
        size: rows of a tile.
        words: of a row, for the rows behind its text's trunk.
    """

    rows: int
    tiles: int
    size: int
    words: int

    def fit(self, counts: Sequence[int], behind: int) -> bool:
        """Whether a batch fits.

        Args:
            counts: rows of each text.
            behind: most rows behind a text's trunk.
        """
        tiles = sum(-(-count // self.size) for count in counts)
        return sum(counts) <= self.rows and tiles <= self.tiles and behind <= WORD * self.words


class Tiles:
    """The rows of a batch in tiles, and what they see.

    Args:
        segments: of the batch, in the order of its rows.
        device: where the numbers go.
        room: sizes to pad to, at least what the segments take.

    Attributes:
        size: rows of a tile.
        words: of a row, for the rows behind its text's trunk.
        counts: [tiles, COUNTED] int32 zeros, which attention leaves as it finds them.
    """

    def __init__(
        self, segments: Sequence[Segment], device: torch.device, room: TileSizes | None = None
    ) -> None:
        self._device, self._room = device, room
        self._lay(segments)
        self.counts = torch.zeros(len(self._first), COUNTED, dtype=torch.int32, device=device)
        self._seen: dict[int | None, Sent] = {}

    def _lay(self, segments: Sequence[Segment]) -> None:
        """Assign rows to tiles."""
        self._segments = segments
        self._texts = np.array(
            [(one.first, one.count, one.start, one.length) for one in segments]
        ).T
        first, count, _, _ = self._texts
        if self._room is None:
            most = count.max()
            self.size = ONE if most <= ONE else FEW if most <= FEW else MANY
            behind = max(segment.num_behind for segment in segments)
            self.words = max(1, -(-behind // WORD))
        else:
            self.size, self.words = self._room.size, self._room.words
        tiles = -(-count // self.size)
        self._text = np.repeat(np.arange(len(segments)), tiles)
        nth = np.arange(len(self._text)) - np.repeat(tiles.cumsum() - tiles, tiles)
        self._first = first[self._text] + nth * self.size
        self._count = np.minimum(self.size, count[self._text] - nth * self.size)

    def refill(self, segments: Sequence[Segment]) -> None:
        """Take another batch of the same padded sizes, in the same memory of the device."""
        self._lay(segments)
        for window, sent in self._seen.items():
            sent.again(*self._look(window))

    def seen(self, window: int | None) -> tuple[Tensor, Tensor]:
        """What tiles and rows see, shared by all layers with the same window.

        Args:
            window: positions that a token sees, its own included; None for all.

        Returns:
            `tiles` and `rows` of `kernels.attention.attend`.
        """
        sent = self._seen.get(window)
        if sent is None:
            sent = self._seen[window] = Sent(self._device, *self._look(window))
        tiles, rows = sent.views
        return tiles.view(6, -1), rows.view(2 + self.words, -1)

    def _look(self, window: int | None) -> tuple[np.ndarray, np.ndarray]:
        """Both tensors of `seen`, padded."""
        first_row, count, start, length = self._texts
        text = np.repeat(np.arange(len(count)), count)
        last = (start + length - count)[text] + np.arange(len(text)) - first_row[text]
        first = start[text]
        if window is not None:
            first = np.maximum(first, last - window + 1)
        base, behind = start + length, np.zeros_like(start)
        words = np.zeros((len(text), self.words), np.int64)
        for number, segment in enumerate(self._segments):
            if segment.branches is None:
                continue
            positions, sees = segment.behind
            own = slice(segment.first, segment.first + segment.count)
            behind[number] = len(positions)
            base[number] -= len(positions)
            last[own] = base[number] - 1
            queries = positions[-segment.count :]
            if window is not None:
                sees &= positions > queries[:, None] - window
                first[own] = segment.start + np.maximum(0, queries - window + 1)
            words[own] = _bits(sees, self.words)
        low = np.minimum.reduceat(np.minimum(first, base[text]), self._first)
        high = np.maximum.reduceat(last, self._first) + 1
        high = np.where(behind[self._text] > 0, (base + behind)[self._text], high)
        tiles = np.stack(
            (self._first, self._count, low, high, base[self._text], behind[self._text])
        )
        rows = np.stack((first, last))
        if self._room is not None:
            tiles = np.pad(tiles, ((0, 0), (0, self._room.tiles - tiles.shape[1])))
            spare = (0, self._room.rows - rows.shape[1])
            rows = np.pad(rows, ((0, 0), spare))
            words = np.pad(words, (spare, (0, 0)))
        return tiles, np.concatenate((rows.ravel(), words.ravel()))


def _bits(sees: np.ndarray, words: int) -> np.ndarray:
    """[n, words] int64 of `WORD` bits each, from [n, W] bool."""
    padded = np.pad(sees, ((0, 0), (0, WORD * words - sees.shape[1])))
    packed = np.packbits(padded, axis=1, bitorder="little")
    return np.ascontiguousarray(packed).view("<u4").astype(np.int64)


class Sent:
    """Arrays of int64 on the device, flattened and sent in one asynchronous transfer.

    Attributes:
        views: one per array.
    """

    def __init__(self, device: torch.device, *arrays: np.ndarray) -> None:
        self._flat = _flat(arrays).to(device, non_blocking=True)
        ends = np.cumsum([array.size for array in arrays]).tolist()
        self.views = [
            self._flat[end - array.size : end] for end, array in zip(ends, arrays, strict=True)
        ]

    def again(self, *arrays: np.ndarray) -> None:
        """Overwrite them with arrays of the same sizes."""
        self._flat.copy_(_flat(arrays), non_blocking=True)


def _flat(arrays: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate([array.ravel() for array in arrays], dtype=np.int64))

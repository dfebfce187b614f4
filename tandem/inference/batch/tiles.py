"""A ragged batch in tiles of rows, each of one text, for one call of attention per layer.

A row sees a range of its text's trunk, and of the rows after the trunk those of its own path.
The trunk's range is two slots of the pool, since an extent is contiguous; the rows after it are
bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tandem.kernels.attention import COUNTED, WORD

if TYPE_CHECKING:
    from tandem.inference.batch.segment import Segment


# Rows of a tile: for plain decoding and the steps of a draft; for verifications; for prompts.
ONE, FEW, MANY = 4, 16, 64
# Words of bits for the rows after a trunk, in captured passes: trees, and what a verification
# feeds before them.
WORDS = 4
_NOTHING = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class TileSizes:
    """Sizes to which a batch is padded, so that it fits a captured pass.

    Attributes:
        rows: of the batch.
        tiles: of the batch.
        size: rows of a tile.
        words: of a row, for the rows after its text's trunk.
    """

    rows: int
    tiles: int
    size: int
    words: int

    def fit(self, rows: int, tiles: int, behind: int) -> bool:
        """Whether a batch fits.

        Args:
            rows: of the batch.
            tiles: of this size, that it takes.
            behind: most rows after a text's trunk.
        """
        return rows <= self.rows and tiles <= self.tiles and behind <= WORD * self.words


class Tiles:
    """The rows of a batch in tiles, and what they see.

    Args:
        segments: of the batch, in the order of its rows.
        device: where the numbers go, in one transfer.
        room: sizes to pad to, at least what the segments take.
        windows: of the model's layers, as far as they are known; others are sent when they are
            asked for.
        beside: further numbers to send.

    Attributes:
        beside: the further numbers, flat, on the device.
        size: rows of a tile.
        words: of a row, for the rows after its text's trunk.
        counts: [tiles, COUNTED] int32 zeros, which attention leaves as it finds them.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        device: torch.device,
        room: TileSizes | None = None,
        windows: Sequence[int | None] = (),
        beside: np.ndarray = _NOTHING,
    ) -> None:
        self._device, self._room = device, room
        windows = tuple(dict.fromkeys(windows))
        self._lay(segments)
        self._sent = Sent(device, beside, *(self._look(window) for window in windows))
        self.beside, *seen = self._sent.views
        self._seen = dict(zip(windows, map(self._apart, seen), strict=True))
        count = self._num_tiles
        self.counts = torch.zeros(count, COUNTED, dtype=torch.int32, device=device)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Those that were asked for, or known."""
        return tuple(self._seen)

    def refill(self, segments: Sequence[Segment], beside: np.ndarray = _NOTHING) -> None:
        """Take another batch of the same padded sizes, in the same memory of the device."""
        self._lay(segments)
        self._sent.again(beside, *(self._look(window) for window in self._seen))

    def take(self, numbers: Tensor) -> None:
        """Take another batch of the same padded sizes, whose numbers are on the device: those
        beside, then those of each window."""
        self._sent.take(numbers)

    def seen(self, window: int | None) -> tuple[Tensor, Tensor]:
        """What tiles and rows see, shared by all layers with the same window.

        Args:
            window: positions that a token sees, its own included; None for all.

        Returns:
            `tiles` and `rows` of `kernels.attention.attend`.

        Raises:
            ValueError: tiles that are refilled, and the window was not known.
        """
        found = self._seen.get(window)
        if found is None:
            if self._room is not None:
                raise ValueError(f"a window of {window}, which no refill would bring up to date")
            (sent,) = Sent(self._device, self._look(window)).views
            found = self._seen[window] = self._apart(sent)
        return found

    def _lay(self, segments: Sequence[Segment]) -> None:
        """Assign rows to tiles."""
        self._segments, room = segments, self._room
        self._texts = np.array(
            [(one.first, one.count, one.start, one.length) for one in segments]
        ).T
        first, count, _, _ = self._texts
        self._count = int(first[-1] + count[-1])
        if room is None:
            most = count.max()
            self.size = ONE if most <= ONE else FEW if most <= FEW else MANY
            behind = max(segment.num_behind for segment in segments)
            self.words = max(1, -(-behind // WORD))
        else:
            self.size, self.words = room.size, room.words
        tiles = -(-count // self.size)
        self._text = np.repeat(np.arange(len(segments)), tiles)
        nth = np.arange(len(self._text)) - np.repeat(tiles.cumsum() - tiles, tiles)
        self._first = first[self._text] + nth * self.size
        self._rows = np.minimum(self.size, count[self._text] - nth * self.size)
        self._num_tiles = len(self._text) if room is None else room.tiles
        self._num_rows = self._count if room is None else room.rows

    def _apart(self, sent: Tensor) -> tuple[Tensor, Tensor]:
        end = 6 * self._num_tiles
        return sent[:end].view(6, -1), sent[end:].view(2 + self.words, -1)

    def _look(self, window: int | None) -> np.ndarray:
        """Both tensors of `seen`, flat and padded."""
        flat = np.zeros(6 * self._num_tiles + (2 + self.words) * self._num_rows, np.int64)
        tiles = flat[: 6 * self._num_tiles].reshape(6, -1)[:, : len(self._text)]
        rows = flat[6 * self._num_tiles :]
        first, last = rows[: 2 * self._num_rows].reshape(2, -1)[:, : self._count]
        words = rows[2 * self._num_rows :].reshape(-1, self.words)
        first_row, count, start, length = self._texts
        text = np.repeat(np.arange(len(count)), count)
        last[:] = (start + length - count - first_row)[text] + np.arange(len(text))
        first[:] = start[text] if window is None else np.maximum(start[text], last - window + 1)
        end = start + length
        behind = np.zeros_like(end)
        for number, segment in enumerate(self._segments):
            if segment.branches is None:
                continue
            behind[number] = segment.num_behind
            own = slice(segment.first, segment.first + segment.count)
            last[own] = end[number] - behind[number] - 1
            if window is None:
                words[own] = _words(segment.paths, self.words)
                continue
            positions, sees = segment.behind
            queries = positions[-segment.count :]
            first[own] = segment.start + np.maximum(0, queries - window + 1)
            words[own] = _bits(sees & (positions > queries[:, None] - window), self.words)
        base = (end - behind)[self._text]
        tiles[0], tiles[1], tiles[4], tiles[5] = self._first, self._rows, base, behind[self._text]
        tiles[2] = np.minimum(np.minimum.reduceat(first, self._first), base)
        tiles[3] = np.where(
            tiles[5] > 0, end[self._text], np.maximum.reduceat(last, self._first) + 1
        )
        return flat


def one_row_each(
    starts: Sequence[int],
    lengths: Sequence[int],
    room: TileSizes,
    windows: Sequence[int | None],
    steps: int,
    scratch: int,
) -> np.ndarray:
    """What tiles and rows see in several batches, of one more token of each text.

    Args:
        starts: first slot of each text.
        lengths: of each, before the first batch.
        room: sizes to pad to; a tile a row.
        windows: of the model's layers.
        steps: batches.
        scratch: slot of spare rows.

    Returns:
        [steps, N] int64: positions and slots of the rows, then as `Tiles` sends them.
    """
    texts, windows = len(starts), tuple(dict.fromkeys(windows))
    position = np.array(lengths, np.int64) + np.arange(steps)[:, None]
    slot = np.array(starts, np.int64) + position
    places = np.zeros((steps, 2, room.rows), np.int64)
    places[:, 1] = scratch
    places[:, 0, :texts], places[:, 1, :texts] = position, slot
    parts = [places.reshape(steps, -1)]
    for window in windows:
        tiles = np.zeros((steps, 6, room.tiles), np.int64)
        rows = np.zeros((steps, 2 + room.words, room.rows), np.int64)
        first = np.array(starts) if window is None else np.maximum(starts, slot - window + 1)
        tiles[:, 0, :texts], tiles[:, 1, :texts] = np.arange(texts), 1
        tiles[:, 2, :texts] = rows[:, 0, :texts] = first
        tiles[:, 3, :texts] = tiles[:, 4, :texts] = slot + 1
        rows[:, 1, :texts] = slot
        parts += tiles.reshape(steps, -1), rows.reshape(steps, -1)
    return np.concatenate(parts, 1)


def _words(paths: Sequence[int], words: int) -> np.ndarray:
    """[n, words] of `WORD` bits each, from n numbers."""
    size = words * WORD // 8
    packed = b"".join(path.to_bytes(size, "little") for path in paths)
    return np.frombuffer(packed, "<u4").reshape(-1, words)


def _bits(sees: np.ndarray, words: int) -> np.ndarray:
    """[n, words] of `WORD` bits each, from [n, W] bool."""
    padded = np.pad(sees, ((0, 0), (0, WORD * words - sees.shape[1])))
    packed = np.packbits(padded, axis=1, bitorder="little")
    return np.ascontiguousarray(packed).view("<u4")


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

    def take(self, numbers: Tensor) -> None:
        """Overwrite them with numbers of the device."""
        self._flat.copy_(numbers)


def _flat(arrays: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate([array.ravel() for array in arrays], dtype=np.int64))

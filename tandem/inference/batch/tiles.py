"""A ragged batch in tiles of rows, each of one text, for one call of attention per layer.

A tile sees one range of the pool, since an extent is contiguous. So the host knows the first and
last block that a kernel has to read for it, without asking the device. The device makes the table
of all blocks from these: on the host it would take as long, and as many bytes, as the longest text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

if TYPE_CHECKING:
    from tandem.inference.batch.segment import Segment


# Positions of the pool that a kernel reads together. Extents begin at the start of a block, so that
# no tile reads what another text holds.
BLOCK = 64
# Rows of a tile: the fewest for tensor cores, for drafts and verifications; more for prompts.
FEW, MANY = 16, 64


@dataclass(frozen=True, slots=True)
class TileSizes:
    """Sizes to which a batch is padded, so that it fits a captured pass.

    Attributes:
        rows: of the batch.
        tiles: of `FEW` rows, each of another text.
        blocks: most blocks of the pool that a tile may see.
    """

    rows: int
    tiles: int
    blocks: int


class Tiles:
    """The rows of a batch, each text's padded to whole tiles, and what they see.

    Args:
        segments: at least two, or any number with `room`.
        device: where rows and masks go.
        room: sizes to pad to, at least what the segments take; each segment is then one tile.

    Attributes:
        size: rows of a tile.
        rows: [N] int64, the row of the batch in each of the N slots; arbitrary for padding.
        slots: [T] int64, the slot of each row of the batch; arbitrary for padding.
    """

    def __init__(
        self, segments: Sequence[Segment], device: torch.device, room: TileSizes | None = None
    ) -> None:
        self._device, self._room = device, room
        rows, slots = self._lay(segments)
        self._sent_rows = Sent(device, np.int64, rows, slots)
        self.rows, self.slots = self._sent_rows.views
        self._seen: dict[int | None, Sent] = {}
        self._tables: dict[int | None, Tensor] = {}
        self._masks: dict[int | None, BlockMask] = {}
        self._caps: dict[float, Callable[..., Tensor]] = {}

    def _lay(self, segments: Sequence[Segment]) -> tuple[np.ndarray, np.ndarray]:
        """Assign rows to slots; returns `rows` and `slots`."""
        first, count, start, length = np.array(
            [(one.first, one.count, one.start, one.length) for one in segments]
        ).T
        self.size = FEW if count.max() <= FEW else MANY
        tiles = -(-count // self.size)
        text = np.repeat(np.arange(len(segments)), tiles)
        # [tiles, size]: the index of each slot among its text's new tokens.
        nth = np.arange(len(text)) - np.repeat(tiles.cumsum() - tiles, tiles)
        nth = nth[:, None] * self.size + np.arange(self.size)
        used = nth < count[text][:, None]
        self._start = start[text][:, None]
        # The last position of the pool that a row sees is its own; -1 for padding, which sees none.
        self._last = np.where(used, (start + length - count)[text][:, None] + nth, -1)
        rows, slots = np.where(used, first[text][:, None] + nth, 0), np.flatnonzero(used)
        if (room := self._room) is not None:
            spare = ((0, room.tiles - len(text)), (0, 0))
            rows, self._start = np.pad(rows, spare), np.pad(self._start, spare)
            self._last = np.pad(self._last, spare, constant_values=-1)
            slots = np.pad(slots, (0, room.rows - len(slots)))
        return rows, slots

    def refill(self, segments: Sequence[Segment]) -> None:
        """Take another batch of the same padded sizes, in the same memory of the device. The tables
        of blocks follow with `tabulate`."""
        self._sent_rows.again(*self._lay(segments))
        for window, sent in self._seen.items():
            sent.again(*self._look(window))

    def tabulate(self) -> None:
        """Write the tables of blocks of all masks again. Only the device works: can be captured."""
        for window, table in self._tables.items():
            _write_blocks(table, self._seen[window])

    def mask(self, window: int | None, positions: int) -> BlockMask:
        """What the slots see, shared by all layers with the same window.

        Args:
            window: positions that a token sees, its own included; None for all.
            positions: of the pool.
        """
        mask = self._masks.get(window)
        if mask is None:
            mask = self._masks[window] = self._make(window, positions)
        return mask

    def cap(self, softcap: float) -> Callable[..., Tensor]:
        """The function that bounds a score as softcap * tanh(score / softcap), for all layers."""
        capped = self._caps.get(softcap)
        if capped is None:
            # A Python number would become a symbol, which the compiler cannot handle here.
            bound = torch.full((), softcap, dtype=torch.float32, device=self._device)

            def capped(score: Tensor, *_: Tensor) -> Tensor:
                return bound * torch.tanh(score / bound)

            self._caps[softcap] = capped
        return capped

    def _look(self, window: int | None) -> tuple[np.ndarray, ...]:
        """The first and last position that slots see; of each tile, what `_blocks` says."""
        first = np.broadcast_to(self._start, self._last.shape)
        if window is not None:
            first = np.maximum(first, self._last - window + 1)
        return first, self._last, *self._blocks(first[:, 0])

    def _blocks(self, first: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The number of blocks of each tile, from that of the first position it sees; the first and
        the last of them."""
        low = first // BLOCK
        high = np.maximum(self._last.max(1) // BLOCK, low)
        # A kernel reads the number: behind whole tiles, it is aligned in memory.
        return high - low + 1, low, high

    def _make(self, window: int | None, positions: int) -> BlockMask:
        (sees_from, sees_to, counts), table = self._send(window, *self._look(window))

        def sees(_b: Tensor, _h: Tensor, slot: Tensor, position: Tensor) -> Tensor:
            return (position >= sees_from[slot]) & (position <= sees_to[slot])

        return block_mask(self.size, table, counts, sees, positions)

    def _send(self, window: int | None, *numbers: np.ndarray) -> tuple[list[Tensor], Tensor]:
        """Send what slots see.

        Args:
            window: as for `mask`.
            numbers: the last three are those of `_blocks`.

        Returns:
            The numbers, flat int32, without the first and last blocks; the table of blocks that
            these make, [tiles, most] int32.
        """
        sent = self._seen[window] = Sent(self._device, np.int32, *numbers)
        *_, counts, _, _ = numbers
        most = counts.max() if self._room is None else self._room.blocks
        # Rounded up to a multiple of four, since a size of 1 would be compiled separately.
        shape = len(counts), -(-int(most) // 4) * 4
        table = torch.empty(shape, dtype=torch.int32, device=self._device)
        self._tables[window] = table
        _write_blocks(table, sent)
        return sent.views[:-2], table


def _write_blocks(table: Tensor, sent: Sent) -> None:
    """Write a table of blocks [tiles, most], from the first and last ones, which were sent last of
    all. Entries beyond a tile's last block repeat it, and are not read."""
    *_, low, high = sent.views
    nth = torch.arange(table.shape[1], dtype=torch.int32, device=table.device)
    torch.minimum(low[:, None] + nth, high[:, None], out=table)


def block_mask(
    size: int,
    table: Tensor,
    counts: Tensor,
    sees: Callable[..., Tensor],
    positions: int,
) -> BlockMask:
    """A mask of tiles.

    Args:
        size: rows of a tile.
        table: [tiles, most] int32, the blocks that each tile reads.
        counts: [tiles] int32, number of blocks of each tile.
        sees: whether a row sees a position.
        positions: of the pool.
    """
    return BlockMask.from_kv_blocks(
        counts[None, None],
        table[None, None],
        BLOCK_SIZE=(size, BLOCK),
        mask_mod=sees,
        seq_lengths=(len(table) * size, positions),
        compute_q_blocks=False,
    )


class Sent:
    """Arrays on the device, flattened and sent in one asynchronous transfer.

    Attributes:
        views: one per array.
    """

    def __init__(self, device: torch.device, kind: type[np.integer], *arrays: np.ndarray) -> None:
        self._kind = kind
        self._flat = _flat(kind, arrays).to(device, non_blocking=True)
        ends = np.cumsum([array.size for array in arrays]).tolist()
        self.views = [
            self._flat[end - array.size : end] for end, array in zip(ends, arrays, strict=True)
        ]

    def again(self, *arrays: np.ndarray) -> None:
        """Overwrite them with arrays of the same sizes."""
        self._flat.copy_(_flat(self._kind, arrays), non_blocking=True)


def _flat(kind: type[np.integer], arrays: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate([array.ravel() for array in arrays]).astype(kind))


class BranchTiles(Tiles):
    """`Tiles` for batches with trees; chains among them see the same as in `Tiles`."""

    def _lay(self, segments: Sequence[Segment]) -> tuple[np.ndarray, np.ndarray]:
        self._segments = segments
        self._rows, slots = super()._lay(segments)
        return self._rows, slots

    def _make(self, window: int | None, positions: int) -> BlockMask:
        first, last, base, ancestors = self._look_behind(window)
        width = ancestors.shape[-1]
        low = np.where(self._last < 0, positions, first).min(1)
        numbers = (first, last, base, ancestors, *self._blocks(low))
        (sees_from, sees_to, behind, seen, counts), table = self._send(window, *numbers)
        # A Python number would become a symbol, which the compiler cannot handle here.
        columns = torch.full((), width, dtype=torch.int32, device=self._device)

        def sees(_b: Tensor, _h: Tensor, slot: Tensor, position: Tensor) -> Tensor:
            column = position - behind[slot]
            inside = (column >= 0) & (column < columns)
            ancestor = seen[slot * columns + torch.where(inside, column, 0)] > 0
            in_trunk = (position >= sees_from[slot]) & (position <= sees_to[slot])
            return in_trunk | (inside & ancestor)

        return block_mask(self.size, table, counts, sees, positions)

    def _look_behind(self, window: int | None) -> tuple[np.ndarray, ...]:
        """What slots see: the first and last position of a trunk, [tiles, size] each; where the
        rows after it begin; and which of those rows, [tiles, size, W]."""
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
    """What each new row of a sequence sees, in slots of the pool: the first and last one of the
    trunk; where the rows after it begin; and which of those rows, [count, W]."""
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

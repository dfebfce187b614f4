"""One sequence's part of a packed batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tandem.inference.kv.branches import Branches


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's part of a batch.

    Attributes:
        first: its first row of the batch.
        count: its new tokens.
        start: first slot of its extent of the pool; 0 where it has a table.
        length: its slots in use, the new ones included.
        branches: its branch rows, which are the last of these slots; None for a chain, whose order
            in memory is the order of the text.
        table: its blocks of the pool; None where it has an extent.
        skipped: positions of its text that have no slot.
    """

    first: int
    count: int
    start: int
    length: int
    branches: Branches | None = None
    table: Sequence[int] | None = None
    skipped: int = 0

    @property
    def reach(self) -> int:
        """Positions of the longest text in it: branches share positions."""
        if self.branches is None:
            return self.skipped + self.length
        return self.skipped + self.length - len(self.branches) + self.branches.depth

    @property
    def num_behind(self) -> int:
        """Rows after the part of the trunk that was there before the feed; 0 for a chain."""
        return 0 if self.branches is None else max(self.count, len(self.branches))

    @property
    def paths(self) -> list[int]:
        """With branches: which of the rows of `behind` each new token sees, as bits."""
        assert self.branches is not None
        later = max(0, self.count - len(self.branches))
        trunk = (1 << later) - 1
        own = self.branches.paths[later - self.count :] if self.count > later else ()
        return [
            *((1 << row + 1) - 1 for row in range(later)),
            *(path << later | trunk for path in own),
        ]

    @property
    def behind(self) -> tuple[np.ndarray, np.ndarray]:
        """With branches: the rows after the part of the trunk that was there before the feed.

        Returns:
            The positions [W] of these rows, and [count, W] bool: which of them each new token sees.
        """
        assert self.branches is not None
        depths = np.array(self.branches.depths)
        later = max(0, self.count - len(depths))  # new tokens that extend the trunk
        trunk = self.length - len(depths)
        positions = np.concatenate((np.arange(trunk - later, trunk), trunk - 1 + depths))
        sees = np.tri(self.count, len(positions), dtype=bool)
        sees[later:, later:] = self.branches.sees[later - self.count :]
        return positions, sees

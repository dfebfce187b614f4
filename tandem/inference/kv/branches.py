"""Branch rows of a sequence: a tree whose root is the trunk's end. Runs on the host only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Branches:
    """Rows that follow a trunk in memory, numbered from 1 in the order in which they were fed.

    Attributes:
        parents: of each row: 0 for the trunk's end, else the number of an earlier row.
        depths: of each row; 1 for a child of the trunk's end. A row's position in its text is that
            of the trunk's last token plus its depth.
    """

    parents: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def depth(self) -> int:
        """Depth of the deepest row; 0 without any."""
        return max(self.depths, default=0)

    @cached_property
    def in_line(self) -> bool:
        """Whether each row is the child of the one before: a chain, whose order in memory is the
        order of its text."""
        return self.parents == tuple(range(len(self)))

    def first(self, count: int) -> Branches:
        """The first rows alone."""
        if count == len(self):
            return self
        return Branches(self.parents[:count], self.depths[:count])

    def grown(self, parents: Sequence[int]) -> Branches:
        """These rows and further ones.

        Raises:
            ValueError: a parent is no earlier row.
        """
        depths = list(self.depths)
        for parent in parents:
            if not 0 <= parent <= len(depths):
                raise ValueError(f"a parent {parent} after {len(depths)} branch rows")
            depths.append(1 + (depths[parent - 1] if parent else 0))
        return Branches((*self.parents, *parents), tuple(depths))

    def check_path(self, path: Sequence[int]) -> None:
        """Raises ValueError unless the first row of a path is a child of the trunk's end, and each
        further row a child of the one before."""
        before = 0
        for row in path:
            if not 0 < row <= len(self) or self.parents[row - 1] != before:
                raise ValueError(f"row {row} is no child of row {before}")
            before = row

    @cached_property
    def paths(self) -> tuple[int, ...]:
        """Of each row, the rows that it sees, as bits: row n is bit n - 1."""
        found: list[int] = []
        for row, parent in enumerate(self.parents):
            found.append(1 << row | (found[parent - 1] if parent else 0))
        return tuple(found)

    @cached_property
    def sees(self) -> np.ndarray:
        """[n, n] bool: whether a row sees another. A row sees its ancestors and itself only."""
        found = np.eye(len(self), dtype=bool)
        for row, parent in enumerate(self.parents):
            if parent:
                found[row] |= found[parent - 1]
        return found


NO_BRANCHES = Branches()

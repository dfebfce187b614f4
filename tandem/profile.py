"""What a model's passes take, by how many sequences share a pass and by how many rows each has."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from math import inf

# Sequences in a pass, rows of each, nanoseconds.
PassTime = tuple[int, int, float]
# Where nothing is measured: a millisecond, and each further row adds 2 %.
_NOMINAL = (((1, 1), 1e6), ((1, 51), 2e6))
# A pass of one sequence with as many rows is one of a prompt.
_PROMPT_ROWS = 100


class Profile:
    """Interpolates measured passes.

    Attributes:
        known: whether there are any.

    Args:
        measured: passes, in any order; those of impossible numbers are left out.
    """

    def __init__(self, measured: Sequence[PassTime] = ()) -> None:
        passes = {each[:2]: each[2] for each in measured if all(0 < x < inf for x in each)}
        self.known = bool(passes)
        self._levels: dict[int, list[tuple[float, float]]] = {}
        for (sequences, rows), nanoseconds in sorted(passes.items()) or _NOMINAL:
            level = self._levels.setdefault(sequences, [])
            # More rows never take less; else it was the measurement.
            level.append((rows, max(nanoseconds, level[-1][1]) if level else nanoseconds))
        total = {
            sequences * rows: nanoseconds
            for sequences, level in self._levels.items()
            for rows, nanoseconds in level
        }
        least, most = min(total), max(total)
        # By total rows: of passes with prompts where some are measured, since those with a few rows
        # each may be computed in another way.
        self._by_rows = [(rows, total[rows]) for rows in sorted({least, most})]
        if (alone := self._levels.get(1, [])) and alone[-1][0] >= _PROMPT_ROWS:
            self._by_rows = alone
        self.at = lru_cache(maxsize=1024)(self._at)

    def rows_within(self, nanoseconds: float, rows: float = 0) -> float:
        """How many rows of prompts make a pass take that much longer.

        Args:
            nanoseconds: that they may take.
            rows: that the pass has besides.
        """
        if len(self._by_rows) == 1:  # further rows cost nothing, as far as is known
            return inf
        end = _on_line(self._by_rows, rows) + nanoseconds
        at = bisect_left([time for _, time in self._by_rows], end)
        at = min(max(at, 1), len(self._by_rows) - 1)
        (x0, y0), (x1, y1) = self._by_rows[at - 1 : at + 1]
        return max(x0 + (end - y0) * (x1 - x0) / max(y1 - y0, 1.0) - rows, 0.0)

    def _at(self, sequences: int, rows: float) -> float:
        """Nanoseconds of a pass of a number of sequences, with a number of rows of each."""
        if len(self._levels) == 1:  # rows of one sequence cost nearly what those of several do
            ((measured, level),) = self._levels.items()
            return _on_line(level, rows * sequences / measured)
        return _on_line(
            [(count, _on_line(level, rows)) for count, level in self._levels.items()], sequences
        )


def _on_line(points: Sequence[tuple[float, float]], x: float) -> float:
    """The value at x of a line through points, which goes on beyond the last two."""
    if len(points) == 1:
        return points[0][1]
    at = min(max(bisect_left(points, (x,)), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[at - 1 : at + 1]
    return max(y0 + (x - x0) * max((y1 - y0) / (x1 - x0), 0.0), y0 / 2)

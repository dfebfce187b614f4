"""Figures beside their limits and bars, as a short table for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

# A reply of the tool that lends a GPU has so many characters at its end, log lines included.
MOST_CHARACTERS = 10_500


@dataclass(frozen=True)
class Figure:
    """One number that was measured.

    Attributes:
        line: that it stands in, such as "target, 16 texts, context 128".
        name: within the line.
        value: measured.
        unit: of value and limit; empty for a share or a number.
        limit: what the device allows in the same unit, or what the value is compared with.
        bar: that value / limit has to keep, or the value where there is no limit.
        least: whether the bar is the least to reach; else the most to take.
        mark: a letter after the value: "L" for a pass launched kernel by kernel.
    """

    line: str
    name: str
    value: float
    unit: str = "ms"
    limit: float | None = None
    bar: float | None = None
    least: bool = False
    mark: str = ""

    @property
    def ratio(self) -> float | None:
        """The value by its limit."""
        return self.value / self.limit if self.limit else None

    @property
    def holds(self) -> bool:
        """Whether it keeps its bar; so it does without one."""
        if self.bar is None:
            return True
        compared = self.value if self.ratio is None else self.ratio
        return compared >= self.bar if self.least else compared <= self.bar

    @property
    def _said_bar(self) -> str:
        if self.bar is None:
            return ""
        return f"{'>=' if self.least else '<='}{self.bar:g}{'' if self.holds else ' FAILED'}"

    def __str__(self) -> str:
        ratio = "" if self.ratio is None else f"={self.ratio:.2f}x"
        bar = f" [{self._said_bar}]" if self.bar is not None else ""
        return f"{self.name} {said(self.value)}{self.mark}{ratio}{bar}"

    @property
    def in_full(self) -> str:
        """A row of the long table."""
        limit = "" if self.limit is None else said(self.limit)
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        head = f"{self.line}: {self.name}{f' ({self.mark})' if self.mark else ''}"
        return (
            f"{head:<64} {said(self.value):>9} {self.unit:<9}{limit:>9}{ratio:>7} {self._said_bar}"
        )


def said(value: float) -> str:
    """A number with three digits or so."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.3g}"


def long_table(figures: Iterable[Figure]) -> list[str]:
    """A line for each figure."""
    head = f"{'':<64} {'measured':>9} {'':<9}{'limit':>9}{'ratio':>7} bar"
    return [head, *(figure.in_full for figure in figures)]


def short_table(figures: Iterable[Figure], most: int) -> list[str]:
    """A line for each one's figures, cut to so many characters: value, its letter, =ratio of the
    limit, [bar]."""
    lines: list[str] = []
    left = most
    by_line: dict[str, list[Figure]] = {}
    for figure in figures:
        by_line.setdefault(figure.line, []).append(figure)
    for name, each in by_line.items():
        unit = f" ({each[0].unit})" if each[0].unit else ""
        line = f"{name}{unit}: {'  '.join(map(str, each))}"
        left -= len(line) + 1
        if left < 0:
            return [*lines, "... the rest is in gpu.txt"]
        lines.append(line)
    return lines


def failed(figures: Iterable[Figure]) -> Iterator[str]:
    """What keeps no bar, a line each."""
    for figure in figures:
        if not figure.holds:
            yield f"{figure.line}: {figure}"

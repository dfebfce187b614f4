"""Tests whether two samples of texts follow the same law."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from scipy import stats

# Least expected count of a cell in the smaller sample; rarer outcomes share one cell.
_EXPECTED = 5.0
# With a few engines, one run in some two hundred gives a false alarm.
ALARM = 1e-3


@dataclass(frozen=True)
class Comparison:
    """A two-sample chi-square.

    Attributes:
        what: what was counted.
        statistic: chi-square.
        degrees: of freedom.
        p: probability of a statistic at least this large under one law.
    """

    what: str
    statistic: float
    degrees: int
    p: float


@dataclass(frozen=True)
class Law:
    """Two samples of an engine compared.

    Attributes:
        texts: of each sample.
        comparisons: by position, and by pairs of neighbours.
    """

    texts: tuple[int, int]
    comparisons: tuple[Comparison, ...]

    @property
    def worst(self) -> Comparison:
        """The comparison that is strongest evidence against one law."""
        return min(self.comparisons, key=lambda c: (c.p, -c.statistic / max(c.degrees, 1)))

    @property
    def p(self) -> float:
        """The p-value of all comparisons together (Bonferroni)."""
        return min(1.0, self.worst.p * len(self.comparisons))

    @property
    def holds(self) -> bool:
        """Whether there is no significant evidence against one law."""
        return self.p >= ALARM


def two_sample(what: str, ours: Sequence[Hashable], theirs: Sequence[Hashable]) -> Comparison:
    """Chi-square of two samples' counts; rare outcomes are pooled."""
    counts = Counter(ours), Counter(theirs)
    total = counts[0] + counts[1]
    share = min(len(ours), len(theirs)) / (len(ours) + len(theirs))
    common = {outcome for outcome, n in total.items() if n * share >= _EXPECTED}
    cells = [[count[outcome] for outcome in sorted(common, key=repr)] for count in counts]
    rest = [len(sample) - sum(row) for sample, row in zip((ours, theirs), cells, strict=True)]
    if sum(rest):
        cells = [[*row, other] for row, other in zip(cells, rest, strict=True)]
    sizes, statistic = (len(ours), len(theirs)), 0.0
    for column in zip(*cells, strict=True):
        for size, seen in zip(sizes, column, strict=True):
            expected = sum(column) * size / sum(sizes)
            statistic += (seen - expected) ** 2 / expected
    degrees = len(cells[0]) - 1
    p = float(stats.chi2.sf(statistic, degrees)) if degrees else 1.0
    return Comparison(what, statistic, degrees, p)


def compare(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> Law:
    """Compare two samples, token by token and by pairs of neighbours.

    Args:
        ours: texts of one length, drawn independently.
        theirs: texts of the other sample.
    """
    length = min(len(text) for text in (*ours, *theirs))
    found = [
        two_sample(f"token {i + 1}", [t[i] for t in ours], [t[i] for t in theirs])
        for i in range(length)
    ]
    for i in range(length - 1):
        pairs = [[(t[i], t[i + 1]) for t in texts] for texts in (ours, theirs)]
        found.append(two_sample(f"tokens {i + 1} and {i + 2}", *pairs))
    return Law((len(ours), len(theirs)), tuple(found))


def common_start(ours: Sequence[int], theirs: Sequence[int]) -> float:
    """The share of a text before it first differs from the other."""
    length = min(len(ours), len(theirs))
    same = next((i for i in range(length) if ours[i] != theirs[i]), length)
    return same / max(len(ours), len(theirs), 1)

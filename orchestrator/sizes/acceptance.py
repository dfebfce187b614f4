"""How likely drafted tokens are kept: by depth, and by rank among siblings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from orchestrator.text.contracts import Decided, Drafted

# A mean over the last 64 observations is steady to 0.04. One over the last six notices a drafter
# that turned bad, or good again, within four: where the two are further apart than chance
# makes them (0.3 is three of its standard errors), the quick one is believed, as if of three.
_STEADY, _QUICK, _APART, _ANEW = 64, 6, 0.3, 3
# A text is told from the others once it has observed as much as this; it forgets what is older.
_OTHERS, _OWN = 16, 32
# Before anything was seen: of the first of all siblings, of the second, and of later ones.
_PRIOR_FIRST, _PRIOR_LATER = 0.7, (0.1, 0.05)
# Deeper ones are as the last, and of more siblings none is worth drawing.
_DEEPEST, _RANKS = 32, 8


@dataclass(slots=True)
class Share:
    """A running mean that notices a change.

    Attributes:
        value: of the last observations, in [0, 1].
        count: of observations behind it, at most `steady`.
        steady: that it looks back on.
    """

    value: float
    count: int = 0
    steady: int = _STEADY
    _quick: float = field(init=False)

    def __post_init__(self) -> None:
        self._quick = self.value

    def add(self, observed: float) -> bool:
        """Take an observation in.

        Returns:
            Whether it has changed since before.
        """
        self.count = min(self.count + 1, self.steady)
        self.value += (observed - self.value) / min(self.count + 1, self.steady)
        self._quick += (observed - self._quick) / _QUICK
        if self.count >= _QUICK and abs(self._quick - self.value) > _APART:
            self.value, self.count = self._quick, _ANEW
            return True
        return False

    def forget(self) -> None:
        """What was observed holds no longer."""
        self.count = 0


@dataclass(frozen=True, slots=True)
class Chances:
    """That a node is kept where its parent is.

    Attributes:
        first: of first siblings, by depth.
        later: of later ones, by rank.
    """

    first: Sequence[float]
    later: Sequence[float]

    def of(self, depth: int, rank: int) -> float:
        """Of a node of a depth, from 1, and a rank, from 0."""
        if not rank:
            return self.first[depth - 1]
        return self.later[rank - 1] if rank <= len(self.later) else 0.0


class AcceptanceEstimate:
    """What was seen of drafts: by one text, with what all texts saw behind it.

    Attributes:
        shared: by all texts; None for that one itself.
    """

    def __init__(self, shared: AcceptanceEstimate | None = None) -> None:
        self.shared = shared
        steady = _OWN if shared else _STEADY
        self._first = [Share(_PRIOR_FIRST, steady=steady) for _ in range(_DEEPEST)]
        later = [*_PRIOR_LATER, *[_PRIOR_LATER[-1]] * (_RANKS - 1 - len(_PRIOR_LATER))]
        self._later = [Share(value, steady=steady) for value in later]
        # Asked for far more often than anything is seen: for which depth, with what behind it.
        self._known: tuple[int, Chances | None, Chances] | None = None

    def chances(self, depth: int) -> Chances:
        """For nodes down to a depth."""
        behind = None if self.shared is None else self.shared.chances(depth)
        if self._known is None or self._known[0] != depth or self._known[1] is not behind:
            self._known = depth, behind, self._weigh(depth, behind)
        return self._known[2]

    def _weigh(self, depth: int, behind: Chances | None) -> Chances:
        """What was seen here against what all texts saw."""
        first: list[float] = []
        for at in range(depth):
            own = self._first[min(at, _DEEPEST - 1)]
            # A depth that is seldom drafted takes the estimate of the depth before it.
            fill, weight = (first[-1] if first else own.value), max(_QUICK - own.count, 0)
            if behind is not None:
                fill, weight = behind.first[at], _OTHERS
            first.append((weight * fill + own.count * own.value) / (weight + own.count or 1))
        later: list[float] = []
        for at, own in enumerate(self._later):
            fill, weight = (own.value, 1) if behind is None else (behind.later[at], _OTHERS)
            later.append((weight * fill + own.count * own.value) / (weight + own.count))
        return Chances(first, later)

    def observe(self, drafted: Drafted, decided: Decided) -> None:
        """See what became of a draft, where its context was emitted."""
        self._known = None
        for depth, node in enumerate(drafted.first_children(decided.place)):
            if depth == _DEEPEST:
                break
            if self._first[depth].add(min(decided.overlaps[node], 1.0)):
                for deeper in self._first[depth + 1 :]:  # seldom seen now, and as changed
                    deeper.forget()
        if drafted.parents is not None:
            for rank, kept in _ranks(drafted.parents, decided.place):
                self._later[rank - 1].add(float(kept))
        if self.shared is not None:
            self.shared.observe(drafted, decided)


def _ranks(parents: Sequence[int], place: int) -> list[tuple[int, bool]]:
    """Of later siblings at the places of a kept path: their rank, and whether they were kept."""
    seen: list[tuple[int, bool]] = []
    kept: int | None = None
    while True:
        siblings = [node + 1 for node, parent in enumerate(parents) if parent == place]
        seen += [(rank, siblings[rank] == kept) for rank in range(1, min(len(siblings), _RANKS))]
        if not place:
            return seen
        kept, place = place, parents[place - 1]

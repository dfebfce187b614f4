"""How many drafted tokens were kept, place by place."""

from __future__ import annotations

from collections import Counter

from tandem.tools.traces.read.request import TracedRound

# No draft is longer: a larger recorded number is not a draft length, and is ignored.
_LONGEST = 256


class RecordedAcceptance:
    """Counts the drafted rounds that one rule decided."""

    def __init__(self) -> None:
        self._rounds: Counter[tuple[int, int]] = Counter()

    def add(self, round_: TracedRound) -> None:
        """Count a round."""
        if 0 < round_.gamma <= _LONGEST:
            self._rounds[round_.gamma, min(round_.accepted, round_.gamma)] += 1

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return self._rounds.total()

    @property
    def drafted(self) -> list[int]:
        """Rounds that drafted a token at each place, the first place first."""
        return [self._count(place, 0) for place in self._places]

    @property
    def reached(self) -> list[int]:
        """Rounds that drafted a token at each place, and kept all before it."""
        return [self._count(place, place - 1) for place in self._places]

    @property
    def accepted(self) -> list[int]:
        """Rounds that kept the token at each place."""
        return [self._count(place, place) for place in self._places]

    @property
    def _places(self) -> range:
        return range(1, self.longest + 1)

    def _count(self, drafted: int, kept: int) -> int:
        """Rounds with at least `drafted` tokens drafted and `kept` tokens kept."""
        rounds = self._rounds.items()
        return sum(count for (g, a), count in rounds if g >= drafted and a >= kept)

    @property
    def longest(self) -> int:
        """The longest draft length; 0 without any."""
        return max((gamma for gamma, _ in self._rounds), default=0)

    @property
    def commonest_gamma(self) -> int:
        """The commonest draft length; 0 without any."""
        gammas: Counter[int] = Counter()
        for (gamma, _), count in self._rounds.items():
            gammas[gamma] += count
        return gammas.most_common(1)[0][0] if gammas else 0

    @property
    def rate(self) -> float:
        """Accepted / drafted tokens; 0 without any."""
        drafted = sum(gamma * count for (gamma, _), count in self._rounds.items())
        return sum(self.accepted) / drafted if drafted else 0.0

    @property
    def block_efficiency(self) -> float:
        """Mean of accepted + 1; 0 without a round."""
        return 1 + sum(self.accepted) / self.rounds if self.rounds else 0.0

    @property
    def onward(self) -> list[float]:
        """For each place: of the drafts kept up to it, the share that kept its token too."""
        return [a / r if r else 0.0 for a, r in zip(self.accepted, self.reached, strict=True)]

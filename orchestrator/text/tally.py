"""Counts of a text, kept round by round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """What was drafted, kept and emitted.

    Attributes:
        new_tokens: emitted.
        gammas: each round's draft length, the prefill (0) first.
        nodes: tokens that each round drafted.
        accepted: each round's number of kept tokens.
        accepted_per_rank: how often a kept token was the first of its siblings, the second, ...
        overlap_sum: Σ min(p, q) over drafted positions whose context was emitted.
        overlap_positions: how many those are.
        draft_bytes: size of the drafts' distributions.
    """

    new_tokens: int = 0
    gammas: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    accepted_per_rank: list[int] = field(default_factory=list)
    overlap_sum: float = 0.0
    overlap_positions: int = 0
    draft_bytes: int = 0

    def add_round(
        self, gamma: int, nodes: int, ranks: Sequence[int], overlaps: Sequence[float]
    ) -> None:
        """Count one round.

        Args:
            gamma: length of its draft.
            nodes: tokens of it.
            ranks: of the kept ones among their siblings.
            overlaps: of what was drafted in a context that was emitted.
        """
        self.gammas.append(gamma)
        self.nodes.append(nodes)
        self.accepted.append(len(ranks))
        for rank in ranks:
            missing = rank + 1 - len(self.accepted_per_rank)
            self.accepted_per_rank += [0] * missing
            self.accepted_per_rank[rank] += 1
        self.overlap_sum += sum(overlaps)
        self.overlap_positions += len(overlaps)

    @property
    def drafted_tokens(self) -> int:
        """Tokens drafted."""
        return sum(self.nodes)

    @property
    def accepted_tokens(self) -> int:
        """Drafted tokens kept."""
        return sum(self.accepted)

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted; 0 without a draft."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0

    @property
    def block_efficiency(self) -> float:
        """Mean of accepted + 1 over drafted rounds; 0 without one."""
        drafted = [a + 1 for g, a in zip(self.gammas, self.accepted, strict=True) if g]
        return sum(drafted) / len(drafted) if drafted else 0.0

    @property
    def accepted_per_position(self) -> list[int]:
        """How often the token at each place of a draft was kept."""
        places = range(max(self.gammas, default=0))
        return [sum(a > place for a in self.accepted) for place in places]

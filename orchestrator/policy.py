"""How many tokens to draft in a round."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.peers import Decided, Drafted


@dataclass(frozen=True, slots=True)
class FixedGamma:
    """The same length each round, but for what is left of max_new_tokens.

    Attributes:
        gamma: the draft length; 0 decodes plainly.
        covers_end: draft all that is left, for a rule that modifies the target's law: its last
            draft must reach the end of the text, so that no modified position is ever drawn
            without the drafter's distribution there.
    """

    gamma: int
    covers_end: bool = False

    def choose(self, left: int) -> int:
        """The length of the next draft, with `left` >= 1 tokens still to emit."""
        return min(self.gamma, left if self.covers_end else left - 1)

    def observe(self, drafted: Drafted | None, decided: Decided) -> None:
        """Nothing is learnt: with a fixed length a seed repeats its text."""

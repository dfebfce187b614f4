"""How much to draft in a round."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.peers.text.contracts import DraftReply, SizeChoice, VerdictReply
from tandem.speculation.tree import DraftSize


@dataclass(frozen=True, slots=True)
class FixedSize:
    """The same each round, but for what is left of max_new_tokens.

    Attributes:
        gamma: the draft length; 0 decodes plainly.
        nodes: of a tree; 0 where drafts are chains.
        needs_every_draft: draft all that is left, for a rule that modifies the target's law: its
            last draft must reach the end of the text, so that no modified position is ever drawn
            without the drafter's distribution there.
    """

    gamma: int
    nodes: int = 0
    needs_every_draft: bool = False

    @property
    def begins_drafting(self) -> bool:
        """Unless it decodes plainly."""
        return self.gamma > 0

    def choose(self, left: int) -> SizeChoice:
        """The next draft's, with `left` >= 1 tokens still to emit."""
        gamma = min(self.gamma, left if self.needs_every_draft else left - 1)
        return SizeChoice(DraftSize(gamma, self.nodes if gamma else 0), rounds=left)

    def observe(self, drafted: DraftReply | None, decided: VerdictReply) -> None:
        """Nothing is learnt: with a fixed length a seed repeats its text."""

    def end(self) -> None:
        """Nothing is held."""

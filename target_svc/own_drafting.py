"""A text as the drafter in its target's own process has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.drafting.drafter import DraftSequence
from tandem.engine.answers import Decision
from tandem.speculation.feedback import Feedback, FeedbackWanted

# Rounds without a draft whose hidden states are kept for the next one: of more, the oldest are
# dropped, and a head begins again after the gap.
_MOST_UNTOLD = 64


@dataclass(eq=False)
class OwnDrafting:
    """What the target's own drafter knows of a text, and what it has not been told.

    Attributes:
        news: tokens that it has not been told of, the prompt's among them.
        wanted: feedback that it wants; None for none.
        untold: feedback that it wants and has not been told of.
        sequence: the text as it sees it, from its first draft on.
    """

    news: list[int]
    wanted: FeedbackWanted | None = None
    untold: list[Feedback] = field(default_factory=list)
    sequence: DraftSequence | None = None

    @property
    def wanted_now(self) -> FeedbackWanted | None:
        """What it wants of a round without a draft: once it has drafted for a text, the hidden
        states must have no gap."""
        return None if self.sequence is None else self.wanted

    def note(self, decision: Decision, told: FeedbackWanted | None) -> None:
        """Keep what a verdict brought.

        Args:
            decision: the verdict.
            told: whose wish its feedback follows. If that is not this drafter's own, states are
                kept where both want the same layers.
        """
        self.news += decision.emitted
        if self.untold:  # of rounds before this one
            self.untold[-1:] = [last.lasting for last in self.untold[-1:] if last.lasting.tells]
        own, feedback = self.wanted, decision.feedback
        if own is None or told is None or feedback is None:
            return
        if not told.on_device:
            if not told.has_states_of(own):
                return
            feedback = feedback.lasting
        if feedback.tells:
            self.untold = [*self.untold[1 - _MOST_UNTOLD :], feedback]

    def take(self) -> tuple[list[int], Sequence[Feedback]]:
        """Tokens and feedback that the drafter has not been told of; they are told now."""
        news, untold = self.news, self.untold
        self.news, self.untold = [], []
        return news, untold

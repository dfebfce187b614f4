"""Jacobi decoding (Santilli et al., arXiv 2305.10427, algorithm 2): the target's predictions at a
guess are the next guess.

Over a target that was tuned for it this is CLLM (Kou et al., arXiv 2403.00835).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from tandem.drafting.drafter import Drafter, DraftSequence, Recipe, Traits
from tandem.engine.asks import Steps, Truncation
from tandem.engine.scorer import Scorer
from tandem.speculation.draft import Draft
from tandem.speculation.feedback import FeedbackWanted


class JacobiDrafter(Drafter):
    """Guesses after the text what the target predicted there in the last round; certain tokens.

    The first guess, and what goes beyond the predictions, is the last known token again.
    """

    traits = Traits(feedback=FeedbackWanted(top=1, everywhere=True))

    def observe(self, sequence: DraftSequence, emitted: Sequence[int]) -> None:
        """Keep the predictions after the place where the last draft ended."""
        super().observe(sequence, emitted)
        # The prediction at the place itself came out, or another token in its stead.
        known = sequence.feedback.likeliest()
        sequence.state = tuple(token for at, token in known.items() if at >= len(emitted))

    def draft(self, sequence: DraftSequence, round_: int, gamma: int, budget: int) -> Steps[Draft]:
        """A chain of the full length."""
        yield from ()
        gamma = min(gamma, budget)
        guess = list(sequence.state or ())[:gamma]
        last = guess[-1] if guess else sequence.token_ids[-1]
        return Draft.certain([*guess, *[last] * (gamma - len(guess))])


class JacobiRecipe(Recipe):
    """The recipe of `jacobi`."""

    drafts: ClassVar = "what the target predicted after its last draft; no model"
    drafter: ClassVar = JacobiDrafter

    method: Literal["jacobi"] = "jacobi"

    def make(self, scorers: Sequence[Scorer], truncation: Truncation) -> Drafter:
        """See `Recipe`."""
        return JacobiDrafter()

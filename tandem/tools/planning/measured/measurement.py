"""What a plan is made from: times and acceptance that somebody has measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.tools.traces.prediction.costs import Curve


@dataclass(frozen=True, slots=True)
class MeasuredText:
    """A text that was measured.

    Attributes:
        new_tokens: emitted.
        target_prefill_s: of the target's engine, for its prompt.
        drafter_prefill_s: of the drafter's.
        target_passes: that the prompt was divided into at the target.
    """

    new_tokens: int
    target_prefill_s: float
    drafter_prefill_s: float
    target_passes: int = 1


@dataclass(frozen=True)
class Measurement:
    """One pair on its devices. Times are seconds.

    Attributes:
        gamma: draft length that most rounds had.
        verify: of the target's engine for a batch of verifications, by its size.
        draft: of the drafter's engine for one pass of a batch, by its size.
        shares: of the drafts that were kept up to each place.
        texts: that were measured.
        opening_s: of a text from its arrival to its first token, beside the target's engine.
        round_s: of a round beside both engines: network, messages, the orchestrator.
        orchestrator_text_s: that the orchestrator is at work for a text, beside its rounds.
        orchestrator_round_s: the same for a round.
        notes: what had to be assumed.
    """

    gamma: int
    verify: Curve
    draft: Curve
    shares: Sequence[float]
    texts: Sequence[MeasuredText]
    opening_s: float
    round_s: float
    orchestrator_text_s: float
    orchestrator_round_s: float
    notes: Sequence[str] = ()

    @property
    def mean_tokens(self) -> float:
        """Of a text."""
        return sum(text.new_tokens for text in self.texts) / len(self.texts)

    def tokens_a_round(self, gamma: int) -> float:
        """Tokens that a round yields: block efficiency."""
        return 1 + sum(self.shares[:gamma])

    def rounds(self, gamma: int) -> float:
        """Of a text, on average."""
        return max(self.mean_tokens - 1, 0.0) / self.tokens_a_round(gamma)

    def steps(self, gamma: int) -> float:
        """Of a text on its target, on average: passes of its prompt, and rounds."""
        passes = sum(text.target_passes for text in self.texts) / len(self.texts)
        return passes + self.rounds(gamma)

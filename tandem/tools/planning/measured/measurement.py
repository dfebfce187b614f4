"""The basis of a plan: measured times and acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.tools.traces.prediction.costs import Curve


@dataclass(frozen=True, slots=True)
class MeasuredText:
    """A text that was measured.

    Attributes:
        new_tokens: emitted tokens.
        target_prefill_s: time of the target's engine for its prompt.
        drafter_prefill_s: time of the drafter's engine for its prompt.
        target_passes: passes of the target over its prompt.
    """

    new_tokens: int
    target_prefill_s: float
    drafter_prefill_s: float
    target_passes: int = 1


@dataclass(frozen=True)
class Measurement:
    """One pair on its devices. Times are seconds.

    Attributes:
        gamma: draft length of most rounds.
        verify: time of the target's engine for a batch of verifications, by batch size.
        draft: time of the drafter's engine for one pass, by batch size.
        shares: for each place, the share of drafts that kept its token.
        texts: the measured texts.
        opening_s: from a text's arrival to its first token, outside the target's engine.
        round_s: of a round, outside both engines: network, messages, the orchestrator.
        orchestrator_text_s: the orchestrator's own time for a text, outside rounds.
        orchestrator_round_s: the orchestrator's own time for a round.
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
        """Mean length of a text."""
        return sum(text.new_tokens for text in self.texts) / len(self.texts)

    def tokens_a_round(self, gamma: int) -> float:
        """Tokens that a round yields: block efficiency."""
        return 1 + sum(self.shares[:gamma])

    def rounds(self, gamma: int) -> float:
        """Mean rounds of a text."""
        return max(self.mean_tokens - 1, 0.0) / self.tokens_a_round(gamma)

    def steps(self, gamma: int) -> float:
        """Mean steps of a text on its target: passes over its prompt, and rounds."""
        passes = sum(text.target_passes for text in self.texts) / len(self.texts)
        return passes + self.rounds(gamma)

"""What a drafter knows of the target's passes over a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tandem.speculation.feedback import Feedback, Predicted


@dataclass(eq=False)
class KnownFeedback:
    """The newest unbroken run of positions whose hidden states are known, as far as it was not
    taken; and the predictions of the last round.

    Attributes:
        end: the position after the run's last one; 0 before the first.
        predicted: of the newest round, where the drafter wants any and was told; else None. Of a
            round without a draft, of place 0 alone.
    """

    end: int = 0
    predicted: Predicted | None = None
    _parts: list[Feedback] = field(default_factory=list)

    def hear(self, told: Sequence[Feedback]) -> None:
        """Take in what was told since the last draft, round by round."""
        self.predicted = told[-1].predicted if told else None
        for feedback in told:
            if feedback.states is not None:
                self.add(feedback)

    def add(self, told: Feedback) -> None:
        """Go on with a run, or begin a new one after a gap. Positions that are known stay.

        Args:
            told: states of positions that follow each other.
        """
        first, end = told.positions[0], told.positions[-1] + 1
        if not self.end or first > self.end:
            self._parts = [told]
        elif end <= self.end:
            return
        else:
            known = self.end - first
            own = told.positions[known:]
            self._parts.append(replace(told, positions=own, states=told.states[known:]))
        self.end = end

    def likeliest(self) -> dict[int, int]:
        """The likeliest token at each place that was predicted, ascending."""
        return {place: int(row.ids[0]) for place, row in (self.predicted or {}).items()}

    def take(self) -> list[Feedback]:
        """What was not taken yet, in order, up to the run's end."""
        parts, self._parts = self._parts, []
        return parts

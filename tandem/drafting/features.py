"""What a drafter knows of the target's passes: hidden states of a text's positions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tandem.speculation.hidden_dtype import HiddenDtype


@dataclass(frozen=True)
class FeatureSpec:
    """Hidden states that a drafter wants of the target.

    Attributes:
        layers: see `FeedbackSpec` in common.proto.
        hidden_size: numbers of a state.
        dtype: in which they are sent.
        prompt_tokens: how many of the prompt's last positions are wanted.
    """

    layers: tuple[int, ...]
    hidden_size: int
    dtype: HiddenDtype = HiddenDtype.BFLOAT16
    prompt_tokens: int = 1

    @property
    def bytes(self) -> int:
        """Of the states of a position."""
        return len(self.layers) * self.hidden_size * self.dtype.bytes


@dataclass(frozen=True, eq=False)
class Feature:
    """Hidden states of consecutive positions.

    Attributes:
        first: the first position: its place in the text, from 0.
        states: [positions, layers, width], bfloat16 as int16: an array over a message's bytes, or a
            tensor on the device where the target drafts by itself.
    """

    first: int
    states: Any

    @property
    def end(self) -> int:
        """The position behind the last one."""
        return self.first + len(self.states)


@dataclass(eq=False)
class Features:
    """The newest unbroken run of positions whose states are known, as far as it was not taken.

    Attributes:
        end: the position behind the run's last one; 0 before the first.
    """

    end: int = 0
    _parts: list[Feature] = field(default_factory=list)

    def add(self, feature: Feature) -> None:
        """Go on with a run, or begin a new one behind a gap. Positions that are known stay."""
        if not self.end or feature.first > self.end:
            self._parts = [feature]
        elif feature.end <= self.end:
            return
        else:
            self._parts.append(Feature(self.end, feature.states[self.end - feature.first :]))
        self.end = feature.end

    def take(self) -> list[Feature]:
        """What was not taken yet, in order, up to the run's end."""
        parts, self._parts = self._parts, []
        return parts

"""Where a draft ends before its greatest depth: after a token that the drafter found unlikely.

The unlikely token itself is sent: it was drawn, and what is drawn is never withdrawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

StopRule = Literal["fixed", "confidence", "adaptive"]

# Draft & Verify's code (Zhang et al., arXiv 2309.08168, section 3.3): the acceptance that is aimed
# at, how fast acceptance and threshold follow, and a step of the threshold.
_AIM, _KEEP_RATE, _KEEP_THRESHOLD, _STEP = 0.9, 0.5, 0.9, 0.01
# Of probabilities.
THRESHOLD = 0.4


class Stop(NamedTuple):
    """When a draft ends early.

    Attributes:
        rule: "fixed" never; "confidence" after a token whose probability in the drafter's row is
            below the threshold; "adaptive" likewise, with a threshold that each text learns.
        threshold: in [0, 1]; the first one of "adaptive".
    """

    rule: StopRule = "fixed"
    threshold: float = THRESHOLD

    @property
    def early(self) -> bool:
        """Whether a draft may be shorter than asked for."""
        return self.rule != "fixed"

    def begin(self) -> Threshold:
        """Of a text."""
        return Threshold(self.threshold, self.rule == "adaptive")


FIXED = Stop()


@dataclass(eq=False)
class Threshold:
    """The threshold of one text, which follows from what was kept of its drafts.

    Attributes:
        value: at present.
        learns: whether it changes.
        rate: of drafted tokens that are kept, lately.
        drafted: depth of the last draft; 0 where none is to be learnt from.
        asked: the depth that it might have had.
    """

    value: float
    learns: bool
    rate: float = _AIM
    drafted: int = 0
    asked: int = 0

    def learn(self, kept: int) -> None:
        """Learn how many tokens of the last draft were kept (Draft & Verify, equations 3 to 5)."""
        if not self.learns or not self.drafted:
            return
        share = min(kept, self.drafted) / self.drafted
        self.rate = _KEEP_RATE * self.rate + (1 - _KEEP_RATE) * share
        step = 0.0
        if self.rate < _AIM:
            step = _STEP
        elif self.drafted < self.asked:
            step = -_STEP
        self.value = min(max(self.value + (1 - _KEEP_THRESHOLD) * step, 0.0), 1.0)
        self.drafted = 0

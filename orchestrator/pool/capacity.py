"""How many texts and tokens the targets can hold for this orchestrator."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TargetCapacity:
    """What the targets can hold for us, besides what others have open there.

    Attributes:
        texts: at once.
        tokens: of them all, prompts and what follows, as far as targets promise room for them;
            infinite where none says.
        longest: tokens of one text, on the target that can hold the most.
    """

    texts: int
    tokens: float = math.inf
    longest: float = math.inf

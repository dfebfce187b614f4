"""The rollback of BiLD (Kim et al., arXiv 2302.07863, section 3.3): lossy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tandem.verification.lossy.likeliest import LikeliestBehind, ranks
from tandem.verification.verifier import RuleOption


@dataclass(frozen=True)
class FallbackVerifier(LikeliestBehind):
    """Keeps a token unless the target finds it very unlikely: its surprise -log p(x) is at most
    `alpha`, or it is the target's likeliest token anyway.

    The paper's fallback, by which the small model hands over, is a draft that stops where the
    drafter is unsure (`stop = "confidence"` of a recipe).

    Attributes:
        alpha: the largest surprise that is kept, in nats.
    """

    name: ClassVar[str] = "lossy_fallback"
    options: ClassVar[tuple[RuleOption, ...]] = (RuleOption("alpha", 3.0, 0.0, 100.0),)

    alpha: float = 3.0

    def passes(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """See `LikeliestBehind`."""
        rank, own = ranks(rows, tokens)
        return (rank == 1) | ((own >= math.exp(-self.alpha)) & (own > 0))

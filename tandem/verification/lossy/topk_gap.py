"""SpecDec's relaxed verification (Xia et al., arXiv 2203.16487, section 3.2): lossy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tandem.verification.lossy.likeliest import LikeliestBehind, ranks
from tandem.verification.verifier import RuleOption


@dataclass(frozen=True)
class TopkGapVerifier(LikeliestBehind):
    """Keeps a token if it is among the target's `beta` likeliest ones and its log probability is at
    most `tau` below that of the likeliest.

    With `beta` = 1 only the likeliest token passes: the text is the greedy one, at any temperature.

    Attributes:
        beta: the worst rank that is kept, from 1.
        tau: the largest gap, in nats.
    """

    name: ClassVar[str] = "lossy_topk_gap"
    options: ClassVar[tuple[RuleOption, ...]] = (
        RuleOption("beta", 3.0, 1.0, 1024.0),
        RuleOption("tau", 1.0, 0.0, 100.0),
    )

    beta: float = 3.0
    tau: float = 1.0

    def passes(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """See `LikeliestBehind`."""
        rank, own = ranks(rows, tokens)
        near = own >= rows.amax(-1) * math.exp(-self.tau)
        return (rank <= self.beta) & near & (own > 0)

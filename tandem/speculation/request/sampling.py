"""The parameters that turn logits into the distribution that tokens are drawn from."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tandem.speculation.request.shaping import NO_SHAPING, Shaping

MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Sampling:
    """Shaping, then temperature, top-k, top-p and min-p: Hugging Face's order.

    Attributes:
        temperature: divides the logits; 0 takes the argmax. Finite, >= 0.
        top_k: keep the k most likely tokens and their ties; 0 keeps all.
        top_p: keep the smallest set of most likely tokens with at least this mass. (0, 1].
        min_p: drop tokens less likely than this share of the most likely one. [0, 1].
        seed: keys every random number of the request. 64 bits.
        shaping: of the logits.

    Raises:
        ValueError: a value is out of range; the message begins with its name.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    shaping: Shaping = NO_SHAPING

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be finite and >= 0, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0 (0 keeps all tokens), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed must be an unsigned 64-bit number, got {self.seed}")

    @property
    def greedy(self) -> bool:
        """Whether the distribution is a point mass on the argmax."""
        return self.temperature == 0

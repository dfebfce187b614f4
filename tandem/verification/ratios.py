"""Ratios p / q that stay finite."""

from __future__ import annotations

import torch
from torch import Tensor

# Far beyond any ratio that a draft reaches with a probability that matters, and its square
# still fits float32.
MAX_RATIO = 1e18


def ratios(p: Tensor, q: Tensor) -> Tensor:
    """p / q, finite. Where both are 0 the event has probability 0 and 1 (accept) will do."""
    unbounded = torch.where(p == 0, 1.0, MAX_RATIO)
    return torch.where(q == 0, unbounded, (p / q).clamp(max=MAX_RATIO))

"""Ratios p / q that stay finite."""

from __future__ import annotations

import torch
from torch import Tensor

# Far above any ratio that occurs with a probability that matters; its square still fits float32.
MAX_RATIO = 1e18


def ratios(p: Tensor, q: Tensor) -> Tensor:
    """p / q, finite. If both are 0, the event has probability 0, and 1 (accept) is returned."""
    unbounded = torch.where(p == 0, 1.0, MAX_RATIO)
    return torch.where(q == 0, unbounded, (p / q).clamp(max=MAX_RATIO))

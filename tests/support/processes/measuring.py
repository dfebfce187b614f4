"""What services measure at their start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

# Numbers of a weight from which its packed layout is taken to be the faster one.
LARGE = 1 << 16


def measure_once() -> None:
    """Each pass is timed once in this process: on a busy machine the time says nothing anyway.

    The layout of weights is never timed: it decides the last bits of logits, and tests compare
    those of two models.
    """
    from tandem.inference.choice import speed
    from tandem.inference.passes import torch_layout

    speed._REPEATS = 1
    torch_layout._ratio = ratio_by_size


def ratio_by_size(plain: Sequence[Any], packed: Sequence[Any], rows: Tensor) -> float:
    """What a quiet machine would measure, by and large."""
    return 2.0 if plain[0].weight.numel() >= LARGE else 0.5

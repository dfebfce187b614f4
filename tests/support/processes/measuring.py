"""What services measure at their start."""

from __future__ import annotations


def measure_once() -> None:
    """Each pass is timed once in this process: on a busy machine the time says nothing anyway."""
    from tandem.inference.choice import speed
    from tandem.inference.passes import torch_layout

    torch_layout._REPEATS = speed._REPEATS = 1

"""CPU threads of a service that shares its cores with others.

The OpenMP threads of an idle service spin for milliseconds before they sleep, on the very
cores that the next service needs. PASSIVE makes them sleep at once; it has to be in the
environment before torch is imported.
"""

from __future__ import annotations

import os


def spin_less() -> None:
    """Let idle OpenMP threads sleep, unless the environment says otherwise."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def use_threads(count: int) -> None:
    """Set the threads of the model; 0 keeps torch's choice, one a core."""
    import torch

    if count:
        torch.set_num_threads(count)

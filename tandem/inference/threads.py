"""Threads of a model.

The OpenMP threads of an idle service spin for milliseconds before they sleep, on cores that the
next service needs. Sleeping at once costs more: a pass has a hundred parallel regions, and each
would have to wake the threads (13 % of a pass of 90 M parameters).
"""

from __future__ import annotations

import os

# Some 100 microseconds.
_SPINS = "2000"
# With a target on the same two cores, a drafter of 1 M parameters was 12 to 30 % faster in one
# thread than in two; a model of 7 M is 20 % faster in two.
_PARAMETERS_A_THREAD = 4_000_000


def spin_less() -> None:
    """Let idle OpenMP threads spin between the parallel regions of a pass, but no longer.

    Call it before torch is imported, which reads these variables. The environment's values win.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
        os.environ.setdefault("KMP_BLOCKTIME", "0")


def use_threads(count: int, parameters: int = 0) -> None:
    """Set the threads of the model.

    Args:
        count: number of threads; 0 chooses by the model's size, at most one per core.
        parameters: of the model.
    """
    import torch

    suited = min(torch.get_num_threads(), 1 + parameters // _PARAMETERS_A_THREAD)
    torch.set_num_threads(count or suited)

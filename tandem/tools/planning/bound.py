"""What keeps a fleet from being smaller."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tandem.tools.load.objective import Objective
from tandem.tools.planning.simulation.pace import Pace
from tandem.tools.planning.simulation.served import RunFigures

NOTHING = "nothing, one target is the least"
SLOTS = "the batch slots"
TARGETS, DRAFTERS = "the targets' engines", "the drafters' engines"
# Above this share of slots in use, texts wait for one.
_ALL_HELD = 0.95
# A limit binds a fleet if its texts use at least this share of it. If they use less, and slightly
# fewer targets still miss the limit, then those are overloaded.
_CLOSE = 0.7
# More slots would help if a target with all slots in use yields this many times as much as with
# half of them.
_WORTH_IT = 1.1


def spent(served: RunFigures, objective: Objective) -> dict[str, NDArray[np.float64]]:
    """For each limit of an objective, the share of it that each text used; above 1 is too late."""
    limits = {
        "TTFT": (served.ttft, objective.ttft_ms),
        "TPOT": (served.tpot, objective.tpot_ms),
        "latency": (served.latency, objective.latency_ms),
    }
    return {
        name: times * 1e3 / limit for name, (times, limit) in limits.items() if limit is not None
    }


def binding(
    pace: Pace, objective: Objective, targets: int, served: RunFigures, fewer: RunFigures | None
) -> str:
    """The resource or limit that fewer targets would lack.

    Args:
        pace: of a target.
        objective: to hold.
        targets: of the fleet.
        served: figures of the fleet.
        fewer: figures of a fleet with fewer targets; None if it cannot serve all texts.
    """
    if targets == 1:
        return NOTHING
    if fewer is None or fewer.slots_held > _ALL_HELD:
        return _fullest(pace)
    missed = {name: float((of > 1).mean()) for name, of in spent(fewer, objective).items()}
    limit = max(missed, key=lambda name: missed[name])
    if np.quantile(spent(served, objective)[limit], objective.share) < _CLOSE:
        return _fullest(pace)
    return f"the objective's {limit}"


def _fullest(pace: Pace) -> str:
    """The exhausted resource of a target whose slots are all in use."""
    speeds = pace.tokens_per_s()
    half = pace.slots // 2
    if not half or pace.slots * speeds[pace.slots] > _WORTH_IT * half * speeds[half]:
        return SLOTS
    full = pace.levels[-1].seen
    return TARGETS if full.target_busy >= full.drafter_busy else DRAFTERS

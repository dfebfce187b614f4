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
# Above this share of places in use, texts wait for one.
_ALL_HELD = 0.95
# A fleet whose texts come this close to a limit is bound by it. Where they have more room, and a
# few targets less miss it all the same, those are overloaded.
_CLOSE = 0.7
# How much more a target has to yield with all of its places than with half of them, for further
# places to help.
_WORTH_IT = 1.1


def spent(served: RunFigures, objective: Objective) -> dict[str, NDArray[np.float64]]:
    """What texts took of each limit of an objective, as a share of it; above 1 is too late."""
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
    """What fewer targets lack.

    Args:
        pace: of a target.
        objective: that is to be held.
        targets: of the fleet.
        served: what texts see of it.
        fewer: what texts see of fewer targets; None where they cannot serve all texts.
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
    """What is used up of a target whose places are all held."""
    speeds = pace.tokens_per_s()
    half = pace.slots // 2
    if not half or pace.slots * speeds[pace.slots] > _WORTH_IT * half * speeds[half]:
        return SLOTS
    full = pace.levels[-1].seen
    return TARGETS if full.target_busy >= full.drafter_busy else DRAFTERS

"""Predicts what given replicas do under a load, by simulating round by round."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from tandem.failure import Failure
from tandem.tools.planning.measured.measurement import Measurement
from tandem.tools.planning.plan import times
from tandem.tools.planning.simulation.rounds import Fleet, OfferedLoad, Rounds, SimulatedFigures

# Most simulated steps of targets in a run, which takes some five seconds.
_MOST_STEPS = 500_000
# Texts of a run, so that some twenty lie above the 99th percentile; and texts of each client, until
# the simulation is in its steady state.
_FEWEST_TEXTS = 2_000
_TEXTS_EACH = 20
_LATENCIES = 8
# A run may have this many times as many steps if each client needs them for this many texts.
_MOST_TIMES = 4
_TEXTS_AT_LEAST = 2
# With random arrivals, fewer targets do not represent many: load varies more on them.
_FEWEST_TARGETS = 8
# The queue grows if, while the second half of the texts arrives, the number of texts in flight
# increases by more than this share of that half.
_GROWTH = 0.1


@dataclass(frozen=True)
class LoadPrediction:
    """The result of a simulated load.

    Attributes:
        gamma: draft length.
        rate: requested texts a second; None in a closed loop.
        served: figures of the replicas that were simulated.
        parts: number of equal parts of the fleet, of which one was simulated.
        targets: simulated targets.
        texts: simulated texts.
        grows: whether the number of texts in flight keeps growing; the times then hold only for
            the simulated texts.
    """

    gamma: int
    rate: float | None
    served: SimulatedFigures
    parts: int
    targets: int
    texts: int
    grows: bool

    @property
    def texts_per_s(self) -> float:
        """Texts a second of the whole fleet."""
        return self.served.texts_per_s * self.parts

    @property
    def of(self) -> int:
        """Targets of the whole fleet."""
        return self.targets * self.parts

    def as_json(self) -> dict[str, Any]:
        """For json.dumps; rates are the whole fleet's."""
        return {
            "gamma": self.gamma,
            "texts_per_s": self.texts_per_s,
            "tokens_per_s": self.served.tokens_per_s * self.parts,
            **times(self.served),
            "target_busy": self.served.target_busy,
            "drafter_busy": self.served.drafter_busy,
            "slots_held": self.served.slots_held,
            "target_batch": self.served.target_batch,
            "queue_grows": self.grows,
            "simulated": {"targets": self.targets, "texts": self.texts},
        }


def predicted(measured: Measurement, fleet: Fleet, load: OfferedLoad) -> LoadPrediction:
    """Simulate a fleet or, if it is too large, an equal part of it with its part of the load.

    Args:
        measured: times and acceptance.
        fleet: that serves.
        load: the offered load; its number of texts is chosen here.

    Raises:
        Failure: even a few texts have too many rounds to simulate.
    """
    steps = max(measured.steps(fleet.gamma), 1.0)
    few = max(int(_MOST_STEPS / steps), 1)
    parts = _parts(fleet, load, few)
    part = replace(fleet, targets=fleet.targets // parts, drafters=fleet.drafters // parts)
    share = replace(load, rate=load.rate / parts, clients=load.clients // parts)
    texts = min(max(_FEWEST_TEXTS, _TEXTS_EACH * share.clients), few)
    texts = max(texts, _TEXTS_AT_LEAST * share.clients)
    if texts * steps > _MOST_TIMES * _MOST_STEPS:
        raise Failure(
            f"{texts} texts of {steps:.0f} rounds are too much to be simulated; size a fleet for a"
            " rate instead, without --targets"
        )
    share = replace(share, texts=texts)
    run = Rounds(measured, part, share)
    served = run.run()
    if load.rate:
        # The run must be much longer than a text, or it would only fill the fleet.
        under_way = min(share.rate * float(served.latency.mean()), part.targets * part.slots)
        enough = min(math.ceil(_LATENCIES * under_way), few)
        if enough > texts:
            share = replace(share, texts=enough)
            run = Rounds(measured, part, share)
            served = run.run()
    grows = bool(load.rate) and _grows(run)
    return LoadPrediction(
        gamma=fleet.gamma,
        rate=load.rate or None,
        served=served,
        parts=parts,
        targets=part.targets,
        texts=share.texts,
        grows=grows,
    )


def _parts(fleet: Fleet, load: OfferedLoad, few: int) -> int:
    """Number of equal parts to divide a fleet into, so that one needs no more than `few` texts."""
    common = math.gcd(fleet.targets, fleet.drafters, load.clients)
    if load.clients:
        needed, fewest = _TEXTS_EACH * load.clients, 1
    else:
        needed, fewest = _LATENCIES * fleet.targets * fleet.slots, _FEWEST_TARGETS
    best = 1
    for parts in range(2, common + 1):
        if needed / best <= max(few, _FEWEST_TEXTS):
            break
        if common % parts == 0 and fleet.targets // parts >= fewest:
            best = parts
    return best


def _grows(run: Rounds) -> bool:
    """Whether many more texts are in flight when the last one arrives than at half of them."""
    arrived = sorted(text.arrived for text in run.ended)
    ended = [text.ended for text in run.ended]
    half = len(arrived) // 2
    middle, last = (
        number - sum(end <= moment for end in ended)
        for number, moment in ((half, arrived[half - 1]), (len(arrived), arrived[-1]))
    )
    return last - middle > _GROWTH * half

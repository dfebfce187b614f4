"""What given replicas do under a load, round by round."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from tandem.failure import Failure
from tandem.tools.planning.measured.measurement import Measurement
from tandem.tools.planning.plan import times
from tandem.tools.planning.simulation.rounds import Fleet, OfferedLoad, Rounds, Simulated

# Steps of texts on targets in a run: some five seconds.
_MOST_STEPS = 500_000
# Texts: a 99th percentile has some twenty behind it. Of a client, until all is as it will stay.
_FEWEST_TEXTS = 2_000
_TEXTS_EACH = 20
_LATENCIES = 8
# Further steps that a run may have where each of its clients has a text or two.
_MOST_TIMES = 4
_TEXTS_AT_LEAST = 2
# Fewer targets do not stand for many where texts come at random: they even out less.
_FEWEST_TARGETS = 8
# Share of the later half of the texts by which those under way may grow while it comes.
_GROWTH = 0.1


@dataclass(frozen=True)
class LoadPrediction:
    """What came of it.

    Attributes:
        gamma: draft length.
        rate: texts a second that were asked for; None in a closed loop.
        served: by those replicas that were simulated.
        parts: that the fleet was divided into, of which one was simulated.
        targets: that were simulated.
        texts: that they were given.
        grows: whether ever more texts are under way, so that times only hold for those given.
    """

    gamma: int
    rate: float | None
    served: Simulated
    parts: int
    targets: int
    texts: int
    grows: bool

    @property
    def texts_per_s(self) -> float:
        """Of the whole fleet."""
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
    """A fleet, or an equal part of one that is too large, with its part of the load.

    Args:
        measured: times and acceptance.
        fleet: that serves.
        load: that is asked for; of its texts as many are taken as tell enough.

    Raises:
        Failure: even a few of its texts are too many rounds to be simulated.
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
        # Half as many again as are under way at once would still be filling the fleet.
        under_way = min(share.rate * float(served.latency.mean()), part.targets * part.slots)
        enough = min(math.ceil(_LATENCIES * under_way), few)
        if enough > texts:
            share = replace(share, texts=enough)
            run = Rounds(measured, part, share)
            served = run.run()
    grows = bool(load.rate) and _grows(run)
    return LoadPrediction(
        fleet.gamma, load.rate or None, served, parts, part.targets, share.texts, grows
    )


def _parts(fleet: Fleet, load: OfferedLoad, few: int) -> int:
    """Into how many equal parts a fleet is divided, so that one needs no more than a few texts."""
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
    """Whether many more texts are under way when the last one comes than at half of them."""
    arrived = sorted(text.arrived for text in run.ended)
    ended = [text.ended for text in run.ended]
    half = len(arrived) // 2
    middle, last = (
        number - sum(end <= moment for end in ended)
        for number, moment in ((half, arrived[half - 1]), (len(arrived), arrived[-1]))
    )
    return last - middle > _GROWTH * half

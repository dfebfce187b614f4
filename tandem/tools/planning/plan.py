"""A plan: a fleet, what it costs, and what the same load would cost without drafts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tandem.failure import Failure
from tandem.tools.planning.measured.measurement import Measurement
from tandem.tools.planning.simulation.served import RunFigures
from tandem.tools.planning.sizing import Need, SizedFleet, Sizing, likely_gamma

_HOUR = 3600.0
_MILLION = 1e6


@dataclass(frozen=True)
class Prices:
    """Prices and GPUs of replicas.

    Attributes:
        target: price of a target per hour.
        drafter: price of a drafter per hour.
        target_gpus: GPUs of a target.
        drafter_gpus: GPUs of a drafter.
    """

    target: float = 0.0
    drafter: float = 0.0
    target_gpus: int = 1
    drafter_gpus: int = 1

    @property
    def are_known(self) -> bool:
        """Whether any price is given; the other is then 0."""
        return bool(self.target or self.drafter)

    def an_hour(self, targets: int, drafters: int) -> float:
        """Price of a fleet per hour; its number of GPUs if there are no prices."""
        if not self.are_known:
            return float(self.gpus(targets, drafters))
        return targets * self.target + drafters * self.drafter

    def gpus(self, targets: int, drafters: int) -> int:
        """GPUs of a fleet."""
        return targets * self.target_gpus + drafters * self.drafter_gpus


@dataclass(frozen=True)
class Plan:
    """What to run.

    Attributes:
        need: the load and its objective.
        prices: of replicas.
        fleet: the cheapest one that holds the objective.
        plain: the fleet that holds it without drafts; None if there is none.
        tokens_a_round: block efficiency.
        mean_tokens: mean length of a text.
        notes: what was assumed.
    """

    need: Need
    prices: Prices
    fleet: SizedFleet
    plain: SizedFleet | None
    tokens_a_round: float
    mean_tokens: float
    notes: tuple[str, ...]

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of all texts at the needed rate."""
        return self.need.rate * self.mean_tokens

    @property
    def speed_up(self) -> float | None:
        """Speed of a text relative to one without drafts, each in its own fleet."""
        if self.plain is None:
            return None
        ours, theirs = (float(np.mean(s.served.tpot)) for s in (self.fleet, self.plain))
        return theirs / ours if ours else None

    @property
    def is_cheaper_plain(self) -> bool:
        """Whether the load costs less without drafts, in money or, without prices, in GPUs."""
        if self.plain is None:
            return False
        ours, theirs = (
            self.prices.an_hour(sized.targets, sized.drafters) for sized in (self.fleet, self.plain)
        )
        return theirs < ours

    def gpus(self, sized: SizedFleet) -> int:
        """GPUs of a fleet."""
        return self.prices.gpus(sized.targets, sized.drafters)

    def million_tokens(self, sized: SizedFleet) -> float | None:
        """Price of a million tokens at the needed rate; None without prices."""
        if not self.prices.are_known:
            return None
        hour = self.prices.an_hour(sized.targets, sized.drafters)
        return hour / (self.tokens_per_s * _HOUR) * _MILLION

    def as_json(self) -> dict[str, Any]:
        """For json.dumps."""
        return {
            "rate": self.need.rate,
            "objective": vars(self.need.objective),
            "prices": asdict(self.prices),
            "fleet": self._fleet(self.fleet),
            "without_drafts": self.plain and self._fleet(self.plain),
            "tokens_a_round": self.tokens_a_round,
            "speed_up": self.speed_up,
            "is_cheaper_plain": self.is_cheaper_plain,
            "bound": self.fleet.bound,
            "notes": list(self.notes),
        }

    def _fleet(self, sized: SizedFleet) -> dict[str, Any]:
        return {
            "gamma": sized.gamma,
            "targets": sized.targets,
            "drafters": sized.drafters,
            "orchestrators": sized.orchestrators,
            "gpus": self.gpus(sized),
            "price_an_hour": self.prices.an_hour(sized.targets, sized.drafters)
            if self.prices.are_known
            else None,
            "price_a_million_tokens": self.million_tokens(sized),
            "good": sized.good,
            "in_use": sized.busy,
            "simulated": {"targets": sized.simulated, "texts": sized.texts},
            "texts_per_s": self.need.rate,
            "tokens_per_s": self.tokens_per_s,
            **times(sized.served),
        }


def times(served: RunFigures) -> dict[str, float]:
    """Percentiles of a simulated run, milliseconds, for json.dumps."""
    found = {}
    for name, seconds in (
        ("ttft", served.ttft),
        ("tpot", served.tpot),
        ("latency", served.latency),
    ):
        for share in (50, 99):
            found[f"{name}_p{share}_ms"] = float(np.percentile(seconds, share)) * 1e3
    return found


def planned(measured: Measurement, need: Need, prices: Prices, gamma: int | None) -> Plan:
    """The cheapest fleet with drafts; the one with the fewest GPUs if there are no prices.

    Args:
        measured: times and acceptance.
        need: the load and its objective.
        prices: of replicas.
        gamma: draft length; by default, a few likely ones are tried.

    Raises:
        Failure: no fleet holds the objective.
    """
    likely = likely_gamma(measured, prices.an_hour(1, 0), prices.an_hour(0, 1), need.slots)
    lengths = {gamma} if gamma is not None else {likely, max(likely // 2, 1), measured.gamma}
    fleet, failure = _cheapest(measured, need, prices, lengths)
    plain, notes = None, list(measured.notes)
    if fleet is None or fleet.gamma:
        plain, _ = _cheapest(measured, need, prices, {0})
    if fleet is None:
        reason = failure or Failure("no draft length was tried")
        if plain is None:
            raise reason
        if gamma is not None:
            raise Failure(f"{reason}; without drafts {plain.targets} do: --gamma 0")
        tried = ", ".join(map(str, sorted(lengths)))
        notes.insert(0, f"no fleet with drafts holds the objective (gamma {tried} were tried)")
        fleet, plain = plain, None
    tokens = measured.tokens_a_round(fleet.gamma)
    return Plan(
        need=need,
        prices=prices,
        fleet=fleet,
        plain=plain,
        tokens_a_round=tokens,
        mean_tokens=measured.mean_tokens,
        notes=tuple(notes),
    )


def _cheapest(
    measured: Measurement, need: Need, prices: Prices, lengths: Collection[int]
) -> tuple[SizedFleet | None, Failure | None]:
    """The cheapest fleet with any of these draft lengths, or why there is none."""
    found: list[Sizing] = []
    failure = None
    for length in sorted(lengths):
        try:
            found.append(Sizing(measured, need, length))
        except Failure as error:
            failure = error
    for sizing in sorted(found, key=lambda each: prices.an_hour(each.targets, each.drafters)):
        try:
            return sizing.sized(), None
        except Failure as error:
            failure = error
    return None, failure

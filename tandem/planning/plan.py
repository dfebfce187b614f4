"""A plan: a fleet, what it costs, and what the same load would cost without drafts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tandem.failure import Failure
from tandem.planning.measurement import Measurement
from tandem.planning.served import Served
from tandem.planning.sizing import Need, Sized, Sizing, likely_gamma

_HOUR = 3600.0
_MILLION = 1e6


@dataclass(frozen=True)
class Prices:
    """Of a replica.

    Attributes:
        target: an hour.
        drafter: an hour.
        target_gpus: GPUs of one.
        drafter_gpus: GPUs of one.
    """

    target: float = 0.0
    drafter: float = 0.0
    target_gpus: int = 1
    drafter_gpus: int = 1

    def an_hour(self, targets: int, drafters: int) -> float:
        """Of a fleet; its GPUs where there are no prices."""
        if not self.target and not self.drafter:
            return float(self.gpus(targets, drafters))
        return targets * self.target + drafters * self.drafter

    def gpus(self, targets: int, drafters: int) -> int:
        """Of a fleet."""
        return targets * self.target_gpus + drafters * self.drafter_gpus


@dataclass(frozen=True)
class Plan:
    """What to run.

    Attributes:
        need: what is wanted.
        prices: of replicas.
        fleet: that does it.
        plain: the one that does it without drafts; None where none does.
        tokens_a_round: block efficiency.
        notes: what was assumed.
    """

    need: Need
    prices: Prices
    fleet: Sized
    plain: Sized | None
    tokens_a_round: float
    notes: tuple[str, ...]

    @property
    def speed_up(self) -> float | None:
        """Tokens a second of a text over those without drafts, each in its own fleet."""
        if self.plain is None:
            return None
        ours, theirs = (float(np.mean(s.served.tpot)) for s in (self.fleet, self.plain))
        return theirs / ours if ours else None

    @property
    def is_cheaper_plain(self) -> bool:
        """Whether the load costs less without drafts, in money or else in GPUs."""
        if self.plain is None:
            return False
        ours, theirs = (
            self.prices.an_hour(sized.targets, sized.drafters) for sized in (self.fleet, self.plain)
        )
        return theirs < ours

    def gpus(self, sized: Sized) -> int:
        """Of a fleet."""
        return self.prices.gpus(sized.targets, sized.drafters)

    def million_tokens(self, sized: Sized) -> float | None:
        """Price of a million tokens; None without prices."""
        if not self.prices.target and not self.prices.drafter:
            return None
        hour = self.prices.an_hour(sized.targets, sized.drafters)
        return hour / (sized.served.tokens_per_s * _HOUR) * _MILLION

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
            "bound": next(iter(self.fleet.busy)),
            "notes": list(self.notes),
        }

    def _fleet(self, sized: Sized) -> dict[str, Any]:
        return {
            "gamma": sized.gamma,
            "targets": sized.targets,
            "drafters": sized.drafters,
            "orchestrators": sized.orchestrators,
            "gpus": self.gpus(sized),
            "price_an_hour": self.prices.an_hour(sized.targets, sized.drafters)
            if self.prices.target or self.prices.drafter
            else None,
            "price_a_million_tokens": self.million_tokens(sized),
            "good": sized.good,
            "in_use": sized.busy,
            **figures(sized.served),
        }


def figures(served: Served) -> dict[str, float]:
    """Of a simulated run, for json.dumps; times are milliseconds."""
    found = {"texts_per_s": served.texts_per_s, "tokens_per_s": served.tokens_per_s}
    for name, times in (
        ("ttft", served.ttft),
        ("tpot", served.tpot),
        ("latency", served.latency),
    ):
        for share in (50, 99):
            found[f"{name}_p{share}_ms"] = float(np.percentile(times, share)) * 1e3
    return found


def planned(measured: Measurement, need: Need, prices: Prices, gamma: int | None) -> Plan:
    """The cheapest fleet with drafts, by its GPUs where there are no prices.

    Args:
        measured: times and acceptance.
        need: what is wanted.
        prices: of replicas.
        gamma: draft length; the likeliest few are tried by default.

    Raises:
        Failure: no fleet does it.
    """
    target = prices.target or prices.target_gpus
    drafter = prices.drafter if prices.target or prices.drafter else prices.drafter_gpus
    likely = likely_gamma(measured, target, drafter, need.slots)
    lengths = {gamma} if gamma is not None else {likely, max(likely // 2, 1), measured.gamma}
    found: list[Sizing] = []
    failure = None
    for length in sorted(lengths):
        try:
            found.append(Sizing(measured, need, length))
        except Failure as error:
            failure = error
    if not found:
        raise failure or Failure("no draft length was tried")
    cheapest = min(found, key=lambda sizing: prices.an_hour(sizing.targets, sizing.drafters))
    fleet = cheapest.sized()
    plain = None
    if fleet.gamma:
        try:
            plain = Sizing(measured, need, 0).sized()
        except Failure:
            plain = None
    tokens = measured.tokens_a_round(fleet.gamma)
    return Plan(need, prices, fleet, plain, tokens, tuple(measured.notes))

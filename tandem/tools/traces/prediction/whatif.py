"""Predicts from a recording what a change would be worth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tandem.tools.traces.analysis.stages import DRAFTER, OwnedStage
from tandem.tools.traces.prediction.basis import LONGEST, Basis
from tandem.tools.traces.prediction.costs import batch_curve, mean_batch
from tandem.tools.traces.prediction.speculation import RULES, RatioModel, foreseen

# Sequences in a mean pass of the target, from which on requests share passes.
_SHARED = 1.5


@dataclass(frozen=True)
class PredictedChange:
    """A change, and its predicted speed.

    Attributes:
        change: what is changed.
        tokens_per_s: of a request; None if the recording does not allow a prediction.
        factor: predicted / recorded tokens a second.
        assumption: after the prediction, or why there is none.
        together: factor for all requests together, if it differs.
    """

    change: str
    tokens_per_s: float | None
    factor: float | None
    assumption: str
    together: float | None = None


@dataclass(frozen=True)
class GammaRow:
    """A draft length under a rule."""

    gamma: int
    verifier: str
    tokens_a_round: float
    round_ms: float
    tokens_per_s: float
    factor: float


class Outlook:
    """Predictions.

    Attributes:
        basis: of the predictions.
        tokens_per_s: of a request, as recorded.
        gammas: each draft length under each rule that can be predicted.
        changes: single changes, the one worth most first.
    """

    def __init__(self, basis: Basis) -> None:
        self.basis = basis
        self._group = basis.group
        self._costs = basis.costs()
        self._shares, self._sources = self._rules()
        self.tokens_per_s = self._speed(0.0)
        lengths = sorted({*range(1, LONGEST + 1), basis.way.gamma})
        self.gammas = [self._gamma(rule, gamma) for rule in self._shares for gamma in lengths]
        changes = [*self._other_drafts(), self._faster_drafter(), self._free_network()]
        changes.append(self._batch())
        # Who would draft ahead may be busy verifying, or do so already.
        if not (self._group.inside or self._group.ahead):
            changes.append(self._draft_ahead())
        self.changes = sorted(changes, key=lambda change: -(change.factor or 0.0))

    @property
    def best(self) -> PredictedChange | None:
        """The change worth most to a request; None if none makes it faster."""
        told = [c for c in self.changes if c.factor is not None and c.together is None]
        best = max(told, key=lambda change: change.factor or 0.0, default=None)
        return best if best is not None and (best.factor or 0.0) > 1 else None

    def _rules(self) -> tuple[dict[str, list[float]], dict[str, str]]:
        """Shares of kept drafts by rule, and where each rule's shares come from."""
        own, basis = self.basis.way.verifier, self.basis
        shares = {own: basis.recorded_shares(own) or []}
        sources = {own: "as recorded"}
        for other in sorted(RULES - {own}) if own in RULES else ():
            recorded = basis.recorded_shares(other)
            if basis.way.greedy:
                shares[other], sources[other] = shares[own], "at temperature 0 all rules agree"
            elif recorded is not None:
                shares[other], sources[other] = recorded, "from its own rounds in the recording"
            else:
                shares[other] = RatioModel(shares[own], own).shares(other)
                sources[other] = "from a model of how drafter and target differ (docs/traces.md)"
        return shares, sources

    def _speed(self, saved_ns: float, rounds: float = 1.0, saved_fixed_ns: float = 0.0) -> float:
        """Tokens a second of a request.

        Args:
            saved_ns: time saved in each round.
            rounds: number of rounds, as a multiple of the recorded one.
            saved_fixed_ns: time saved outside rounds, over all requests.
        """
        group = self._group
        fixed = group.wall_ns - group.rounds.round_ns * group.rounds.rounds - saved_fixed_ns
        spent = fixed + (group.rounds.round_ns - saved_ns) * group.rounds.rounds * rounds
        return group.tokens / spent * 1e9 if spent > 0 else 0.0

    def _yield(self, rule: str, gamma: int) -> float:
        """Mean tokens of a round."""
        return 1 + sum(self._shares[rule][:gamma])

    def _gamma(self, rule: str, gamma: int) -> GammaRow:
        way, mean = self.basis.way, self._group.rounds.round_ns
        # Both are multiples of recorded figures, since a text's last rounds draft less than gamma.
        fewer = self._yield(way.verifier, way.gamma) / self._yield(rule, gamma)
        longer = self._costs.round_ns(gamma) / self._costs.round_ns(way.gamma)
        speed = self._speed(mean * (1 - longer), fewer)
        tokens = self._yield(rule, gamma)
        return GammaRow(gamma, rule, tokens, mean * longer / 1e6, speed, speed / self.tokens_per_s)

    def _prediction(self, change: str, speed: float, assumption: str) -> PredictedChange:
        return PredictedChange(change, speed, speed / self.tokens_per_s, assumption)

    def _other_drafts(self) -> list[PredictedChange]:
        """The best other draft length, and each other rule at the recorded length."""
        way = self.basis.way
        mine = [r for r in self.gammas if r.verifier == way.verifier and r.gamma != way.gamma]
        best = max(mine, key=lambda row: row.tokens_per_s)
        longest = self.basis.longest_recorded()
        beyond = (
            f"; positions after {longest} are accepted like those before"
            if best.gamma > longest
            else ""
        )
        found = [
            self._prediction(
                f"gamma {best.gamma}", best.tokens_per_s, self._costs.assumption + beyond
            )
        ]
        for row in self.gammas:
            if row.gamma == way.gamma and row.verifier != way.verifier:
                assumption = f"its acceptance: {self._sources[row.verifier]}"
                found.append(
                    self._prediction(f"verifier {row.verifier}", row.tokens_per_s, assumption)
                )
        return found

    def _faster_drafter(self) -> PredictedChange:
        saved = self._group.rounds.mean_ns("draft.forward") / 2
        prefill = self._group.stages[OwnedStage(DRAFTER, "prefill.forward")] / 2
        assumption = "its passes take half as long; its drafts and all else stay the same"
        speed = self._speed(saved, saved_fixed_ns=prefill)
        return self._prediction("a drafter twice as fast", speed, assumption)

    def _free_network(self) -> PredictedChange:
        rounds, stages = self._group.rounds, self._group.stages
        change = "a free network"
        if not any(stage.name.endswith(".network") for stage in stages):
            reason = "the recording has no CLIENT spans, or no services' below them"
            return PredictedChange(change, None, None, reason)
        free = [s for s in stages if s.name.endswith(".network")]
        fixed = sum(stages[stage] for stage in free if not stage.in_round)
        speed = self._speed(rounds.mean_ns(*(stage.name for stage in free)), saved_fixed_ns=fixed)
        assumption = (
            "no time between the orchestrator's calls and the services' steps; this time includes"
            " gRPC's own work on both sides"
        )
        return self._prediction(change, speed, assumption)

    def _draft_ahead(self) -> PredictedChange:
        way, rounds = self.basis.way, self._group.rounds
        change = "drafting ahead during verification"
        if mean_batch(self.basis.batches.waits, "verify") > _SHARED:
            reason = (
                "texts whose draft is ready leave the passes that they shared with others, which"
                " may cost as much as it gains: record a load of one client"
            )
            return PredictedChange(change, None, None, reason)
        names = {stage.name for stage in rounds.stages}
        draft, verify = (
            rounds.mean_ns(*(name for name in names if name.startswith(f"{step}.")))
            for step in ("draft", "verify")
        )
        right = foreseen(self._shares[way.verifier], way.gamma, way.greedy)
        assumption = (
            f"sixteen drafts are prepared a round, and sent: {right:.1%} of the rounds end as one"
            " of them foresaw, by the recorded acceptance and the embedded pair's guesses; others"
            " cost nothing, if the drafter has a device of its own, which is idle then"
        )
        speed = self._speed(right * min(draft, verify))
        return self._prediction(change, speed, assumption)

    def _batch(self) -> PredictedChange:
        change, waits = "twice the sequences in a batch", self.basis.batches.waits
        grown = 0.0
        for step in ("draft", "verify"):
            curve, now = batch_curve(waits, step), mean_batch(waits, step)
            if curve is None:
                reason = f"all recorded {step} steps have one batch size"
                return PredictedChange(
                    change, None, None, f"{reason}: record a load of several clients"
                )
            grown += max(curve.at(2 * now) - curve.at(now), 0.0)
        speed = self._speed(-grown)
        factor = speed / self.tokens_per_s
        assumption = (
            "twice the requests at once; a pass takes as long as recorded at that size, or as on a"
            " line through the recorded sizes; factor is for one request, together for all"
        )
        return PredictedChange(change, speed, factor, assumption, together=2 * factor)

    def as_json(self) -> dict[str, Any]:
        """For json.dumps."""
        best = self.best
        return {
            "recorded": {
                **self.basis.way._asdict(),
                "requests": self._group.requests,
                "rounds": self._group.rounds.rounds,
                "tokens_per_s": self.tokens_per_s,
            },
            "changes": [vars(change) for change in self.changes],
            "gammas": [vars(row) for row in self.gammas],
            "gamma_assumption": self._costs.assumption,
            "verifier_sources": self._sources,
            "worth_most": best.change if best else None,
        }

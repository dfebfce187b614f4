"""What a load did to a service: rates, latencies, speculation, errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.table import Table

from tandem.tools.load.timeline import Percentiles, Timeline

_SHOWN_ERRORS = 10


@dataclass(frozen=True)
class LoadReport:
    """Figures of a load. Failed texts count as errors and nowhere else.

    Attributes:
        texts: finished texts.
        errors: failed texts by their calls' errors, the commonest first.
        wall_s: from the first start to the last end.
        tokens_per_s: of all clients together.
        texts_per_s: of all clients together.
        latency: of whole texts.
        ttft: time to first token.
        tpot: time per output token.
        itl: raw gaps between messages.
        round: a round's wall time.
        beside_models: a round's wall time minus its forward passes.
        lag: how much later than due texts were requested.
        acceptance: accepted / drafted tokens.
        block_efficiency: tokens per drafted round.
        bytes_per_token: bytes of drafts on the wire per emitted token.
    """

    texts: int
    errors: dict[str, int]
    wall_s: float
    tokens_per_s: float
    texts_per_s: float
    latency: Percentiles | None
    ttft: Percentiles | None
    tpot: Percentiles | None
    itl: Percentiles | None
    round: Percentiles | None
    beside_models: Percentiles | None
    lag: Percentiles | None
    acceptance: float
    block_efficiency: float
    bytes_per_token: float

    @classmethod
    def of(cls, timelines: Sequence[Timeline]) -> LoadReport:
        """Summarise a load of at least one text."""
        done = [timeline for timeline in timelines if not timeline.error]
        first = min(timeline.intended_s for timeline in timelines)
        wall = max(timeline.ended_s for timeline in timelines) - first
        tokens = sum(timeline.tokens for timeline in done)
        summaries = [t.summary for t in done if t.summary is not None]
        drafted = sum(summary.drafted_tokens for summary in summaries)
        accepted = sum(summary.accepted_tokens for summary in summaries)
        rounds = sum(1 for summary in summaries for gamma in summary.gammas if gamma)
        sent = sum(summary.draft_bytes for summary in summaries)
        return cls(
            texts=len(done),
            errors=dict(Counter(t.error for t in timelines if t.error).most_common()),
            wall_s=wall,
            tokens_per_s=tokens / wall,
            texts_per_s=len(done) / wall,
            latency=Percentiles.of([t.latency_s for t in done]),
            ttft=Percentiles.of([t.time_to_first_token_s for t in done]),
            tpot=Percentiles.of([t.time_per_output_token_s for t in done]),
            itl=Percentiles.of([gap for t in done for gap in t.gaps_s]),
            round=Percentiles.of([wall for t in done for wall in t.rounds_s]),
            beside_models=Percentiles.of([s for t in done for s in t.beside_models_s]),
            lag=Percentiles.of([t.lag_s for t in timelines]),
            acceptance=accepted / drafted if drafted else 0.0,
            block_efficiency=accepted / rounds + 1 if rounds else 0.0,
            bytes_per_token=sent / tokens if tokens else 0.0,
        )

    def as_json(self) -> dict[str, object]:
        """For json.dumps; times are milliseconds unless a name says otherwise."""
        return asdict(self)

    def failures(self) -> list[str]:
        """A line for each kind of error."""
        return error_lines(self.errors)

    def tables(self) -> list[Table]:
        """Rates and speculation, then times."""
        rates = Table("", "", show_header=False)
        for name, value in (
            ("texts", f"{self.texts} in {self.wall_s:.1f} s"),
            ("errors", str(sum(self.errors.values()) or "none")),
            ("tokens/s", f"{self.tokens_per_s:.1f}"),
            ("texts/s", f"{self.texts_per_s:.2f}"),
            ("acceptance", f"{self.acceptance:.3f}"),
            ("block efficiency", f"{self.block_efficiency:.3f}"),
            ("bytes per token", f"{self.bytes_per_token:.0f}"),
        ):
            rates.add_row(name, value)
        times = Table("milliseconds", "p50", "p95", "p99", "mean")
        for name, percentiles in (
            ("latency", self.latency),
            ("TTFT", self.ttft),
            ("TPOT", self.tpot),
            ("ITL", self.itl),
            ("round", self.round),
            ("beside the models", self.beside_models),
            ("client's lag", self.lag),
        ):
            values = (
                [f"{value:.2f}" for value in asdict(percentiles).values()]
                if percentiles
                else ["-"] * 4
            )
            times.add_row(name, *values)
        return [rates, times]


def error_lines(errors: Mapping[str, int]) -> list[str]:
    """A line for each kind of error, in their order."""
    lines = [f"{count} x {error}" for error, count in errors.items()]
    further = len(lines) - _SHOWN_ERRORS
    return lines if further <= 0 else [*lines[:_SHOWN_ERRORS], f"and {further} other kinds"]

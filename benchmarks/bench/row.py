"""A row of the table: one way to decode at one temperature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

from benchmarks.bench.floor import Floor
from benchmarks.measure.ratio import ratio
from benchmarks.peers.roster import TANDEM
from benchmarks.peers.way import Way
from tandem.tools.load.report import LoadReport
from tandem.tools.load.timeline import Percentiles, Timeline

# Assisted generation with its default settings: it drafts as long as it is confident.
DEFAULTS = "defaults"


@dataclass(frozen=True)
class Row:
    """Figures of a method; those that do not apply to it are None.

    Attributes:
        name: of the method.
        gamma: draft length; an upper limit if transformers may stop earlier.
        temperature: of all texts.
        tokens_per_s: median over texts.
        speeds: tokens a second of each text, in the order of the turns.
        ttft_ms: median time to first token.
        tpot_ms: median time per output token.
        round: of all texts' rounds.
        beside_models: a round's wall time minus its forward passes.
        target_calls: mean per text.
        acceptance: accepted / drafted tokens.
        block_efficiency: tokens per drafted round.
        block_efficiency_se: its standard error over texts.
        bytes_per_token: of drafts on the wire.
        to_plain: speed over the same system's plain decoding of the same text, median.
        predicted_to_plain: `to_plain` as predicted from block efficiency and bare stage times.
        round_to_floor: mean round / mean bare round in this process.
    """

    name: str
    gamma: int
    temperature: float
    tokens_per_s: float
    speeds: tuple[float, ...] = ()
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    round: Percentiles | None = None
    beside_models: Percentiles | None = None
    target_calls: float | None = None
    acceptance: float | None = None
    block_efficiency: float | None = None
    block_efficiency_se: float | None = None
    bytes_per_token: float | None = None
    to_plain: float | None = None
    predicted_to_plain: float | None = None
    round_to_floor: float | None = None


def measured(
    way: Way,
    temperature: float,
    texts: Sequence[Timeline],
    plain: Sequence[Timeline],
    floor: Floor,
) -> Row:
    """The row of a way's texts.

    Args:
        way: that wrote them.
        temperature: of all of them.
        texts: in the order of the turns.
        plain: the same texts by the same system, without drafts.
        floor: of the dtype that Tandem serves in.
    """
    speeds = tuple(_speed(text) for text in texts)
    pairs = zip(speeds, plain, strict=True)
    report = LoadReport.of(texts)
    rounds = report.round
    efficiency, error, acceptance = _speculation(way, texts)
    bare = floor.rounds.get(way.gamma) if way.engine == TANDEM else None
    return Row(
        name=way.family,
        gamma=way.gamma,
        temperature=temperature,
        tokens_per_s=median(speeds),
        speeds=speeds,
        ttft_ms=median(text.time_to_first_token_s for text in texts) * 1e3,
        tpot_ms=median(text.time_per_output_token_s for text in texts) * 1e3,
        round=rounds,
        beside_models=report.beside_models,
        target_calls=mean(_target_calls(text) for text in texts),
        acceptance=acceptance,
        block_efficiency=efficiency,
        block_efficiency_se=error,
        bytes_per_token=report.bytes_per_token if texts[0].summary else None,
        to_plain=median(speed / _speed(base) for speed, base in pairs),
        predicted_to_plain=(
            efficiency * floor.rounds[0].round_s / bare.round_s if bare and efficiency else None
        ),
        round_to_floor=rounds.mean / 1e3 / bare.round_s if bare and rounds else None,
    )


def floors(floor: Floor, efficiency: dict[int, float], temperature: float) -> list[Row]:
    """The in-process floor and the bandwidth floor at each gamma.

    Args:
        floor: measured bare rounds.
        efficiency: tokens per round by gamma, of the block verifier.
        temperature: of those texts.
    """
    rows = []
    for gamma, times in floor.rounds.items():
        tokens = efficiency[gamma]
        for name, seconds in (
            ("floor in process", times.round_s),
            # The drafter's weights stay in the cache; the target's have to be read once.
            ("floor of bandwidth", floor.target_bytes / floor.bandwidth),
        ):
            rows.append(Row(name, gamma, temperature, tokens / seconds))
    return sorted(rows, key=lambda row: row.name, reverse=True)


def _speed(text: Timeline) -> float:
    """Tokens a second of a whole text, prompt included."""
    return text.tokens / text.latency_s


def _target_calls(text: Timeline) -> int:
    return text.summary.rounds if text.summary is not None else len(text.arrivals)


def _speculation(
    way: Way, texts: Sequence[Timeline]
) -> tuple[float | None, float | None, float | None]:
    """Block efficiency, its standard error, and acceptance."""
    if not way.gamma:
        return None, None, None
    summaries = [text.summary for text in texts if text.summary is not None]
    if summaries:
        rounds = [float(sum(1 for gamma in s.gammas if gamma)) for s in summaries]
        accepted = [float(s.accepted_tokens) for s in summaries]
        drafted = sum(s.drafted_tokens for s in summaries)
    else:
        # transformers tells how many tokens a call gave, not how many it drafted; with its default
        # settings that is not gamma.
        rounds = [float(len(text.arrivals)) for text in texts]
        accepted = [float(text.tokens - len(text.arrivals)) for text in texts]
        drafted = 0 if way.rule == DEFAULTS else way.gamma * int(sum(rounds))
    emitted = [a + r for a, r in zip(accepted, rounds, strict=True)]
    efficiency, error = ratio(emitted, rounds) if len(texts) > 1 else (emitted[0] / rounds[0], None)
    return efficiency, error, sum(accepted) / drafted if drafted else None

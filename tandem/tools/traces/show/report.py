"""A report as JSON and as tables."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from tandem.tools.traces.analysis.ahead import HIT, LATE, MISS
from tandem.tools.traces.analysis.batches import WAITED
from tandem.tools.traces.analysis.figures import RequestFigures
from tandem.tools.traces.analysis.quantiles import Quantiles
from tandem.tools.traces.analysis.report import TraceReport
from tandem.tools.traces.read.clocks import Skew
from tandem.tools.traces.read.spans import Process

_SHARES = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))


def as_json(report: TraceReport) -> dict[str, Any]:
    """For json.dumps; times are milliseconds."""
    return {
        "requests": report.wall.count,
        "tokens": report.tokens,
        "rounds": report.rounds,
        "prompt_tokens": report.prompt_tokens,
        "cached_tokens": report.cached_tokens,
        "drafter_cached_tokens": report.drafter_cached_tokens,
        "tokens_per_s": report.tokens_per_s,
        "wall_ms": _percentiles(report.wall),
        "time_to_first_token_ms": _percentiles(report.first_token),
        "stages": [
            {
                "service": stage.service,
                "stage": stage.name,
                "count": times.count,
                **_percentiles(times),
                "share": report.share(stage),
            }
            for stage, times in report.stages.items()
        ],
        "acceptance": {
            verifier: {
                "rounds": found.rounds,
                "rate": found.rate,
                "block_efficiency": found.block_efficiency,
                "drafted": found.drafted,
                "accepted": found.accepted,
            }
            for verifier, found in sorted(report.acceptance.items())
        },
        "ahead": {
            "rounds": {outcome: report.ahead.rounds[outcome] for outcome in (HIT, LATE, MISS)},
            "drafts": report.ahead.drafts,
            "thrown_away": report.ahead.thrown_away,
            "waited_ms": {
                outcome: report.ahead.mean_ns(outcome) / 1e6 for outcome in (HIT, LATE, MISS)
            },
            "hidden_ms": report.ahead.hidden_ns / 1e6,
        },
        "waits": [
            {
                "step": step,
                "batch_size": size,
                "steps": waits.steps,
                "waited": waits.waited,
                "queue_ms": waits.queue_ns / waits.steps / 1e6,
                "gather_ms": waits.gather_ns / waits.steps / 1e6,
                "forward_ms": waits.forward_ns / waits.steps / 1e6,
            }
            for (step, size), waits in sorted(report.batches.waits.items())
        ],
        "passes": [
            {
                **process._asdict(),
                "passes": passes.count,
                "mean_batch_size": passes.mean_sequences,
                "busy": passes.busy,
            }
            for process, passes in sorted(report.batches.passes.items())
        ],
        "slowest": [_slow(figures) for figures in report.slowest],
        "clock_skew": [_skew(skew) for skew in report.skews],
        "left_out": report.left_out,
    }


def _percentiles(times: Quantiles) -> dict[str, float]:
    return {name: times.at(share) / 1e6 for name, share in _SHARES}


def _slow(figures: RequestFigures) -> dict[str, Any]:
    return {
        "request_id": figures.request_id,
        "trace_id": figures.trace_id,
        "wall_ms": figures.wall_ns / 1e6,
        "tokens": figures.tokens,
        "rounds": figures.rounds,
        "stages_ms": {str(stage): spent / 1e6 for stage, spent in figures.stages.items()},
    }


def _skew(skew: Skew) -> dict[str, Any]:
    return {
        "caller": skew.caller._asdict(),
        "callee": skew.callee._asdict(),
        "offset_ms": skew.offset_ns / 1e6,
        "uncertainty_ms": skew.uncertainty_ns / 1e6,
        "exchanges": skew.exchanges,
        "measured": skew.measured,
        "seen": skew.seen,
    }


def tables(report: TraceReport) -> list[Table]:
    """Stages, acceptance, prepared drafts, waits for a batch, engines, and the slowest requests."""
    found = [_stages(report), _acceptance(report), _ahead(report), _waits(report), _passes(report)]
    return [table for table in (*found, _slowest(report)) if table.row_count]


def _table(title: str, texts: int, *columns: str) -> Table:
    """A table whose first `texts` columns are text, and the others numbers."""
    table = Table(*columns, title=title, title_justify="left", title_style="bold")
    for column in table.columns[texts:]:
        column.justify = "right"
    return table


def _stages(report: TraceReport) -> Table:
    table = _table(
        "Stages of the requests' wall time (milliseconds)",
        2,
        *("service", "stage", "count", "p50", "p95", "p99", "share"),
    )
    for stage, times in report.stages.items():
        values = (f"{times.at(share) / 1e6:.3f}" for _, share in _SHARES)
        table.add_row(*stage, str(times.count), *values, f"{report.share(stage):.1%}")
    table.add_section()
    values = (f"{report.wall.at(share) / 1e6:.3f}" for _, share in _SHARES)
    total = sum(map(report.share, report.stages))
    table.add_row("", "wall time", str(report.wall.count), *values, f"{total:.1%}")
    return table


def _acceptance(report: TraceReport) -> Table:
    table = _table(
        "Acceptance by position",
        1,
        *("verifier", "position", "drafted", "accepted", "share", "of those kept so far"),
    )
    for verifier, found in sorted(report.acceptance.items()):
        places = zip(found.drafted, found.accepted, found.onward, strict=True)
        for place, (drafted, accepted, onward) in enumerate(places, 1):
            cells = (str(place), str(drafted), str(accepted), f"{accepted / drafted:.3f}")
            table.add_row(verifier if place == 1 else "", *cells, f"{onward:.3f}")
        table.add_section()
    return table


def _ahead(report: TraceReport) -> Table:
    ahead = report.ahead
    hidden, wall = ahead.hidden_ns, report.wall.total_ns
    table = _table(
        f"Drafts ahead: {hidden / wall if wall else 0:.1%} of the wall time hidden,"
        f" {ahead.thrown_away:.0%} of {ahead.drafts} prepared drafts thrown away",
        1,
        *("outcome", "rounds", "share", "wait for the draft (mean ms)"),
    )
    for outcome in (HIT, LATE, MISS):
        if ahead.total:
            cells = (str(ahead.rounds[outcome]), f"{ahead.share(outcome):.1%}")
            table.add_row(outcome, *cells, f"{ahead.mean_ns(outcome) / 1e6:.3f}")
    return table


def _waits(report: TraceReport) -> Table:
    table = _table(
        f"Waiting for a batch: steps whose queue and gather took over {WAITED:.0%} of their passes",
        1,
        *("step", "batch size", "steps", "waited", "queue", "gather", "forward (mean ms)"),
    )
    last = ""
    for (step, size), waits in sorted(report.batches.waits.items()):
        means = (waits.queue_ns, waits.gather_ns, waits.forward_ns)
        table.add_row(
            step if step != last else "",
            str(size or "?"),
            str(waits.steps),
            f"{waits.waited / waits.steps:.1%}",
            *(f"{spent / waits.steps / 1e6:.3f}" for spent in means),
        )
        last = step
    return table


def _passes(report: TraceReport) -> Table:
    table = _table("Passes of the engines", 1, "service", "passes", "sequences a pass", "busy")
    engines = report.batches.passes
    for process, passes in sorted(engines.items()):
        cells = (str(passes.count), f"{passes.mean_sequences:.2f}", f"{passes.busy:.1%}")
        table.add_row(process_name(process, list(engines)), *cells)
    return table


def _slowest(report: TraceReport) -> Table:
    table = _table(
        "The slowest requests",
        1,
        *("request", "seconds", "tokens", "rounds", "tokens/s", "longest stage", "its share"),
    )
    for figures in report.slowest:
        stage, share = figures.longest_stage or ("-", 0.0)
        numbers = (f"{figures.wall_ns / 1e9:.3f}", str(figures.tokens), str(figures.rounds))
        speed = f"{figures.tokens_per_s:.1f}"
        table.add_row(figures.request_id, *numbers, speed, str(stage), f"{share:.1%}")
    return table


def process_name(process: Process, all_: list[Process]) -> str:
    """A process's service, with the beginning of its instance if there are several."""
    alike = sum(other.service == process.service for other in all_)
    return f"{process.service} {process.instance[:8]}" if alike > 1 else process.service


def headline(report: TraceReport) -> str:
    """The report in one line."""
    first = f"; first token after {report.first_token.at(0.5) / 1e6:.1f} ms (p50)"
    prompt = report.prompt_tokens
    found = f"; of {prompt} prompt tokens targets found {report.cached_tokens} computed"
    by_drafters = f", drafters {report.drafter_cached_tokens}"
    return (
        f"{report.wall.count} requests, {report.rounds} rounds, {report.tokens} tokens;"
        f" {report.tokens_per_s:.1f} tokens/s a request"
        + (first if report.first_token.count else "")
        + (found + by_drafters if report.cached_tokens or report.drafter_cached_tokens else "")
    )


def remarks(report: TraceReport) -> list[str]:
    """Remarks on clock skew, and on what was left out."""
    lines = []
    processes = [side for skew in report.skews for side in (skew.caller, skew.callee)]
    unique = list(dict.fromkeys(processes))
    for skew in report.skews:
        callee, caller = process_name(skew.callee, unique), process_name(skew.caller, unique)
        lines.append(_said(skew, callee, caller))
    return lines + [f"left out: {sentence}" for sentence in report.left_out]


def _said(skew: Skew, callee: str, caller: str) -> str:
    give = f"± {skew.uncertainty_ns / 1e6:.3f} ms"
    if skew.seen:
        ahead = "ahead of" if skew.offset_ns > 0 else "behind"
        apart = f"{abs(skew.offset_ns) / 1e6:.3f} ms"
        return f"CLOCK SKEW: {callee} is {apart} {ahead} {caller} ({give}); times are corrected"
    how = f"from {skew.exchanges} exchanges" if skew.measured else "no CLIENT spans to tell more"
    return f"clocks of {callee} and {caller}: no skew seen ({give}, {how})"

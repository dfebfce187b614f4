"""The outcomes of all scenarios as one table: for a terminal, and for a document."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from tandem.tools.load.ghz.outcome import Outcome
from tandem.tools.load.ghz.scenario import OK
from tandem.tools.load.objective import Objective
from tandem.tools.load.timeline import Percentiles
from tandem.tools.watch.histogram import Histogram

HEADS = (
    *("load", "calls", "failed", "calls/s", "latency ms", "TTFT ms", "TPOT ms"),
    *("tokens/s", "accepted", "goodput/s"),
)
LEGEND = (
    "Times are p50/p99. Latency is the client's, measured by ghz. TTFT (unless marked client's)"
    " and TPOT are the services', interpolated between the bounds of their histograms."
    " calls/s counts successful calls. goodput/s and its share of all calls are lower bounds:"
    " they count the calls that certainly kept the objective."
)


def rows(outcomes: Sequence[Outcome], objective: Objective) -> list[tuple[str, ...]]:
    """A row per scenario, with the columns of `HEADS`."""
    return [_row(outcome, objective) for outcome in outcomes]


def _row(outcome: Outcome, objective: Objective) -> tuple[str, ...]:
    calls, served = outcome.calls, outcome.served
    wall = calls.wall_s
    goodput = outcome.goodput(objective)
    latency = None if outcome.cuts else calls.latency((OK,))
    first = served.ttft if served else None
    ttft = f"{_times(outcome.ttft)}\nclient's" if outcome.ttft else _buckets(first)
    # Tokens and acceptance mean nothing for texts that are cut after their first tokens.
    told = None if outcome.cuts else served
    accepted = told.figures.acceptance if told else None
    return (
        f"{outcome.name}\n{outcome.loop}",
        str(calls.count),
        str(outcome.failed or "none"),
        "-" if outcome.cuts or not wall else f"{calls.ended((OK,)) / wall:.2f}",
        _times(latency),
        ttft,
        _buckets(served.tpot if served else None, 1),
        f"{told.tokens / wall:.0f}" if told and wall else "-",
        "-" if accepted is None else f"{accepted:.3f}",
        f"≥{goodput.texts_per_s:.2f}\n{goodput.share:.1%}" if goodput else "-",
    )


def _times(times: Percentiles | None) -> str:
    return f"{times.p50:.0f}/{times.p99:.0f}" if times else "-"


def _buckets(seen: Histogram | None, digits: int = 0) -> str:
    found = [seen.quantile(share) for share in (0.5, 0.99)] if seen else []
    known = [f"{seconds * 1e3:.{digits}f}" for seconds in found if seconds is not None]
    return "/".join(known) or "-"


def table(outcomes: Sequence[Outcome], objective: Objective) -> Table:
    """For a terminal."""
    found = Table(*HEADS, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    found.columns[0].no_wrap = True
    for column in found.columns[1:]:
        column.justify, column.overflow = "right", "fold"
    for row in rows(outcomes, objective):
        found.add_row(*row)
    return found


def markdown(outcomes: Sequence[Outcome], objective: Objective) -> str:
    """For a document."""
    return markdown_table(
        HEADS,
        [[cell.replace("\n", ", ") for cell in row] for row in rows(outcomes, objective)],
    )


def markdown_table(heads: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Lines of a table in Markdown, each with its newline."""
    lines = [heads, ["---"] * len(heads), *cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)

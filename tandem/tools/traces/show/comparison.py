"""A comparison and an outlook as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from tandem.tools.traces.analysis.comparison import MIN_REQUESTS, Line, RequestSample
from tandem.tools.traces.prediction.whatif import Outlook

_NO_DIFFERENCE = "no difference seen"
# Less than a nanosecond, in milliseconds.
_NOTHING = 1e-6


def comparison_table(lines: Sequence[Line], before: str, after: str) -> Table:
    """A table with one line per figure."""
    columns = ("", "A", "B", "B - A")
    judged = bool(lines) and lines[0].moved is not None
    title = f"A: {before}, B: {after}"
    table = Table(*columns, *(("interval", "verdict") if judged else ()), title=title)
    table.columns[0].no_wrap = True
    for column in table.columns[1:5]:
        column.justify = "right"
    for line in lines:
        change = line.after - line.before
        relative = f" ({change / line.before:+.1%})" if line.before else ""
        cells = [f"{line.before:.3f}", f"{line.after:.3f}", f"{_signed(change)}{relative}"]
        if line.low is not None and line.high is not None:
            verdict = ("higher" if change > 0 else "lower") if line.moved else _NO_DIFFERENCE
            cells += [f"{_signed(line.low)} … {_signed(line.high)}", verdict]
        style = "bold" if line.moved else "dim" if line.moved is False else ""
        table.add_row(line.name, *cells, style=style)
    return table


def _signed(number: float) -> str:
    return f"{number:+.3g}" if abs(number) > _NOTHING else "0"


def comparison_remarks(
    lines: Sequence[Line], before: RequestSample, after: RequestSample
) -> Iterator[str]:
    """What a reader must know about the intervals."""
    if lines and lines[0].moved is None:
        yield (
            f"{before.count} and {after.count} requests: an interval needs {MIN_REQUESTS} or more"
            " on both sides."
        )
        return
    if not any(line.moved for line in lines):
        yield f"{_NO_DIFFERENCE} between the two recordings."
    yield (
        f"{before.count} and {after.count} requests; in 95 of 100 comparisons all intervals hold."
        " They are over requests:\na machine that was busier during one of the recordings looks"
        " like a change, so record in turn."
    )
    for side in (before, after):
        if side.count > len(side.rows):
            yield f"{len(side.rows)} of {side.count} requests were drawn for the intervals."


def outlook_tables(outlook: Outlook) -> Iterator[Table]:
    """The changes, then the draft lengths."""
    changes = Table("change", "tokens/s", "factor", "together", "assumption")
    for column in changes.columns[1:4]:
        column.justify = "right"
    for change in outlook.changes:
        if change.tokens_per_s is None or change.factor is None:
            changes.add_row(change.change, "-", "-", "", f"not predicted: {change.assumption}")
            continue
        together = f"{change.together:.2f}x" if change.together else ""
        speed = (f"{change.tokens_per_s:.1f}", f"{change.factor:.2f}x", together)
        changes.add_row(change.change, *speed, change.assumption)
    yield changes
    gammas = Table("verifier", "gamma", "tokens a round", "ms a round", "tokens/s", "factor")
    for column in gammas.columns[1:]:
        column.justify = "right"
    last = outlook.gammas[0].verifier if outlook.gammas else ""
    for row in outlook.gammas:
        if row.verifier != last:
            gammas.add_section()
            last = row.verifier
        way = outlook.basis.way
        here = (row.verifier, row.gamma) == (way.verifier, way.gamma)
        numbers = (f"{row.tokens_a_round:.3f}", f"{row.round_ms:.3f}", f"{row.tokens_per_s:.1f}")
        cells = (row.verifier, str(row.gamma), *numbers, f"{row.factor:.2f}x")
        gammas.add_row(*cells, style="bold" if here else "")
    yield gammas


def outlook_headline(outlook: Outlook) -> str:
    """What predictions start from."""
    group, way = outlook.basis.group, outlook.basis.way
    return (
        f"recorded: {way}: {outlook.tokens_per_s:.1f} tokens/s a request, over {group.requests}"
        f" requests and {group.rounds.rounds} rounds"
    )


def outlook_verdict(outlook: Outlook) -> str:
    """The one change worth most."""
    best = outlook.best
    if best is None:
        return "None of these changes would make a request faster."
    return (
        f"Worth most to a request: {best.change}, {best.factor:.2f}x. Assumed: {best.assumption}."
    )

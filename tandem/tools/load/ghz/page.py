"""One self-contained page of a campaign: the table, what went wrong, and pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files
from string import Template

from tandem.tools.load import sweep
from tandem.tools.load.ghz import plots, table
from tandem.tools.load.ghz.outcome import Outcome
from tandem.tools.load.objective import Objective
from tandem.tools.load.sweep import Level


def page(
    outcomes: Sequence[Outcome], levels: Sequence[Level], objective: Objective, about: str
) -> str:
    """The page.

    Args:
        outcomes: of scenarios.
        levels: of a sweep; may be empty.
        objective: for the goodput.
        about: when and where the load ran, in a sentence.
    """
    parts = []
    if outcomes:
        parts += [
            _table(table.HEADS, table.rows(outcomes, objective)),
            f"<p>{escape(table.LEGEND)} A good text: {escape(str(objective))}.</p>",
            _wrong(outcomes),
        ]
    if levels:
        best = sweep.best(levels)
        found = f"{best.rate:.3g} texts a second" if best else "no rate"
        parts += [
            "<h2>The highest rate that holds the objective</h2>",
            f"<p>{found}: {escape(str(objective))}. Poisson arrivals, by Tandem's own client.</p>",
            _table(sweep.HEADS, sweep.rows(levels)),
            _list(sweep.failures(levels)),
            _picture("Latencies and good texts by rate", plots.rates(levels, objective)),
        ]
    drawn = [outcome for outcome in outcomes if outcome.calls.calls]
    pictures: list[tuple[str, Callable[[Sequence[Outcome]], str]]] = [
        ("How calls ended", plots.statuses),
        ("Latencies", plots.distributions),
        ("Latencies in the order of the calls", plots.over_time),
    ]
    for title, draw in pictures if drawn else ():
        parts += [f"<h2>{title}</h2>", _picture(title, draw(drawn))]
    template = Template(files("tandem.tools.load.ghz").joinpath("page.html").read_text("utf-8"))
    return template.substitute(about=escape(about), body="\n".join(parts))


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heads)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>\n" for row in rows
    )
    return f'<div class="wide"><table><tr>{head}</tr>\n{body}</table></div>'


def _wrong(outcomes: Sequence[Outcome]) -> str:
    """What is wrong, and the messages of failed calls."""
    lines = [
        f"{outcome.name}: {line}"
        for outcome in outcomes
        for line in (*outcome.faults, *outcome.reasons)
    ]
    return _list(lines) or "<p>No call failed.</p>"


def _list(lines: Sequence[str]) -> str:
    items = "".join(f'<li class="bad">{escape(line)}</li>' for line in lines)
    return f"<ul>{items}</ul>" if items else ""


def _picture(title: str, svg: str) -> str:
    named = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)
    return f"<figure>{named}</figure>"

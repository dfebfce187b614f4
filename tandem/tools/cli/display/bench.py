"""What `tandem bench` prints."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tandem.failure import Failure
from tandem.tools.cli.display.terminal import out, write_exactly
from tandem.tools.load.objective import Objective
from tandem.tools.load.report import LoadReport
from tandem.tools.load.sweep import Level, best, failures, table
from tandem.tools.load.timeline import Timeline


def report(timelines: Sequence[Timeline], title: str, objective: Objective, as_json: bool) -> None:
    """Print the figures.

    Raises:
        Failure: no text was finished.
    """
    figures, goodput = LoadReport.of(timelines), objective.goodput(timelines)
    if as_json:
        found = {
            **figures.as_json(),
            "objective": vars(objective),
            "goodput": vars(goodput),
            "timelines": [text.as_json() for text in timelines],
        }
        write_exactly(json.dumps(found, indent=2) + "\n")
    else:
        out.print(title)
        for table in figures.tables():
            out.print(table)
        out.print(f"goodput {goodput.texts_per_s:.2f} texts/s, {goodput.share:.1%} of all texts;")
        out.print(f"good is {objective}")
        for line in figures.failures():
            out.out(line, highlight=False)
    if not figures.texts:
        raise Failure(f"every text failed: {next(iter(figures.errors))}")


def report_sweep(levels: Sequence[Level], objective: Objective, as_json: bool) -> None:
    """Print each rate, and the highest one that held the objective.

    Raises:
        Failure: no rate held it.
    """
    found = best(levels)
    if as_json:
        rows = [level.as_json() for level in levels]
        rate = found.rate if found else None
        result = {"objective": vars(objective), "highest_rate": rate, "levels": rows}
        write_exactly(json.dumps(result, indent=2) + "\n")
    else:
        out.print(table(levels))
        for line in failures(levels):
            out.out(line, highlight=False)
    if found is None:
        raise Failure(f"no rate held the objective: {objective}")
    if not as_json:
        out.print(f"{found.rate:.3g} texts a second is the highest rate that held {objective}")

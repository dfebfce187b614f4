"""What `tandem load` prints and writes, and a check of what this needs."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.failure import Failure, Misconfigured
from tandem.tools.cli.display.terminal import err, out

if TYPE_CHECKING:
    from tandem.tools.load.ghz.outcome import Outcome
    from tandem.tools.load.objective import Objective
    from tandem.tools.load.sweep import Level


def require(folder: Path) -> None:
    """Check that a report can be written, before minutes of load.

    Raises:
        Misconfigured: matplotlib is missing, or the folder cannot be made or written to.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise Misconfigured(
            "the report's pictures need matplotlib: pip install 'tandem-llm[plots]'"
        ) from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise Misconfigured(f"cannot write to {folder}: {error.strerror}") from None


def finish(
    outcomes: Sequence[Outcome],
    levels: Sequence[Level],
    objective: Objective,
    address: str | None,
    folder: Path,
) -> None:
    """Print the table and write the report.

    Raises:
        Failure: a load failed, or no rate held the objective.
    """
    from tandem.tools.load.ghz import report, table
    from tandem.tools.load.sweep import failures
    from tandem.tools.load.sweep import table as sweep_table

    if outcomes:
        out.print(table.table(outcomes, objective))
        out.print(f"{table.LEGEND} A good text: {objective}.")
    if levels:
        out.print(sweep_table(levels))
    for outcome in outcomes:
        for line in (*outcome.faults, *outcome.reasons):
            out.out(f"{outcome.name}: {line}", highlight=False)
    for line in failures(levels):
        out.out(f"sweep: {line}", highlight=False)
    err.out(f"written: {report.write(outcomes, levels, objective, address, folder)}", style="dim")
    faults = report.faults(outcomes, levels, objective)
    if faults:
        raise Failure("; ".join(faults))

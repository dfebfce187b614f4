"""The report of a campaign: a page, a document and the figures."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from tandem.tools.load import sweep
from tandem.tools.load.ghz.outcome import Outcome
from tandem.tools.load.ghz.page import page
from tandem.tools.load.ghz.table import LEGEND, markdown, markdown_table
from tandem.tools.load.objective import Objective
from tandem.tools.load.sweep import Level


def write(
    outcomes: Sequence[Outcome],
    levels: Sequence[Level],
    objective: Objective,
    address: str | None,
    folder: Path,
) -> Path:
    """Write report.html, report.md and report.json.

    Args:
        outcomes: of scenarios.
        levels: of a sweep; may be empty.
        objective: for the goodput.
        address: of the orchestrator; None for loads that ran elsewhere.
        folder: for the files.

    Returns:
        The path of report.html.
    """
    folder.mkdir(parents=True, exist_ok=True)
    at = datetime.now(UTC).isoformat(timespec="seconds")
    about = f"{address}, {at}, from {platform.node()}" if address else f"Judged {at}."
    (folder / "report.md").write_text(_document(outcomes, levels, objective, about), "utf-8")
    found = {
        "about": about,
        "objective": vars(objective),
        "loads": [outcome.as_json(objective) for outcome in outcomes],
        "sweep": [level.as_json() for level in levels],
    }
    (folder / "report.json").write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    written = folder / "report.html"
    written.write_text(page(outcomes, levels, objective, about), "utf-8")
    return written


def faults(outcomes: Sequence[Outcome], levels: Sequence[Level], objective: Objective) -> list[str]:
    """What is wrong; empty if all is well."""
    bad = [outcome.name for outcome in outcomes if outcome.faults]
    found = [f"{len(bad)} of {len(outcomes)} loads failed: {', '.join(bad)}"] if bad else []
    if levels and sweep.best(levels) is None:
        found.append(f"no rate held {objective}")
    return found


def _document(
    outcomes: Sequence[Outcome], levels: Sequence[Level], objective: Objective, about: str
) -> str:
    parts = [f"# Tandem under load\n\n{about}\n"]
    if outcomes:
        parts += [f"\n{markdown(outcomes, objective)}", f"\n{LEGEND} A good text: {objective}.\n"]
    lines = [f"- {o.name}: {line}\n" for o in outcomes for line in (*o.faults, *o.reasons)]
    parts += ["\n", *lines] if lines else []
    if levels:
        best = sweep.best(levels)
        found = f"{best.rate:.3g} texts a second" if best else "No rate"
        parts += [f"\n{found} is the highest rate that held {objective}.\n\n"]
        parts += [markdown_table(sweep.HEADS, sweep.rows(levels))]
        parts += ["\n", *(f"- {line}\n" for line in sweep.failures(levels))]
    return "".join(parts)

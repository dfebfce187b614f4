"""Tandem beside what a user would pick instead, and beside the physical limit, in one run.

    python -m benchmarks.bench            the table, within 20 minutes on 2 cores
    python -m benchmarks.bench --sweeps   also concurrency, support size, recorded rows, delay
    python -m benchmarks.bench --quick    a minute, to see that all of it works

The pair is the embedded drafter and the embedded target expanded to 90 M parameters, so
acceptance is real and so is the cost (docs/benchmark.md). Writes a table and a JSON file to
benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.contest import report
from benchmarks.contest.baseline import Baseline
from benchmarks.contest.contest import Contest, connected
from benchmarks.contest.floor import Floor, faster
from benchmarks.contest.method import (
    DTYPES,
    Method,
    System,
    baseline_methods,
    dtypes_of,
    tandem_methods,
)
from benchmarks.contest.row import Row, floors, measured
from benchmarks.contest.run_off import Ratio, run_off
from benchmarks.expand import Shape, expand
from benchmarks.measure.environment import RESULTS, describe
from benchmarks.measure.services import serving
from benchmarks.sweep import sweeps
from benchmarks.sweep.plots import draw
from tandem.failure import Failure
from tandem.tools.local.pair import Pair, embedded

# Wide enough for the table; the file gets the same text.
_WIDTH = 190
_CHOOSING_ROUNDS = 10


@dataclass(frozen=True)
class Plan:
    """How much to measure.

    Attributes:
        shape: of the expanded target.
        gammas: draft lengths.
        dtypes: that transformers tries; Tandem's target takes the faster one.
        temperatures: of the texts.
        new_tokens: of each text.
        repeats: texts of each method and temperature, at most.
        budget_s: for all repeats.
        run_off_texts: of each finalist and temperature, at most.
        run_off_budget_s: for all of those.
        swept: how much the sweeps measure.
    """

    shape: Shape
    gammas: tuple[int, ...]
    dtypes: tuple[str, ...]
    temperatures: tuple[float, ...]
    new_tokens: int
    repeats: int
    budget_s: float
    run_off_texts: int
    run_off_budget_s: float
    swept: sweeps.Sweeps


FULL = Plan(
    shape=Shape(layers=12, width=768, heads=12, kv_heads=12, mlp=2176),
    gammas=(2, 4, 8, 16),
    dtypes=DTYPES,
    temperatures=(0.0, 1.0),
    new_tokens=128,
    repeats=12,
    budget_s=9 * 60,
    run_off_texts=24,
    run_off_budget_s=5 * 60,
    swept=sweeps.FULL,
)
QUICK = Plan(
    shape=Shape(layers=6, width=384, heads=6, kv_heads=6, mlp=1024),
    gammas=(4,),
    dtypes=("float32",),
    temperatures=(0.0, 1.0),
    new_tokens=16,
    repeats=2,
    budget_s=30,
    run_off_texts=2,
    run_off_budget_s=15,
    swept=sweeps.QUICK,
)


@dataclass(frozen=True)
class Outcome:
    """What a run measured.

    Attributes:
        contest: with all texts, and the floor measured between them.
        repeats: done within the budget.
        ratios: of the run-off.
        target_parameters: of the expanded target.
        findings: of the sweeps, if they were asked for.
    """

    contest: Contest
    repeats: int
    ratios: list[Ratio]
    target_parameters: int
    findings: sweeps.Findings | None


def run(plan: Plan, with_sweeps: bool, progress: Progress) -> Outcome:
    """Measure everything."""
    drafter = embedded("drafter")
    with tempfile.TemporaryDirectory() as folder:
        target = f"{folder}/target"
        parameters = expand(Path(embedded("target")), plan.shape, Path(target))
        floor = faster(
            [
                Floor(drafter, target, dtype, (0, *plan.gammas))
                for dtype in dict.fromkeys(dtypes_of(each)[0] for each in plan.dtypes)
            ],
            4,
            _CHOOSING_ROUNDS,
        )
        baselines = {dtype: Baseline(drafter, target, dtype) for dtype in plan.dtypes}
        methods = (
            *baseline_methods(plan.gammas, plan.dtypes),
            *tandem_methods(plan.gammas, f"{floor.dtype}/auto"),
        )
        pair = Pair(target, drafter, dtype=floor.dtype, drafter_dtype="auto")
        with serving(pair) as stack:
            with connected(stack.addresses["orchestrator"]) as (loop, tandem):
                contest = Contest(
                    methods,
                    plan.temperatures,
                    plan.new_tokens,
                    baselines=baselines,
                    tandem=tandem,
                    loop=loop,
                    floor=floor,
                )
                repeats = contest.run(plan.repeats, plan.budget_s, progress)
                ratios = run_off(contest, plan.run_off_texts, plan.run_off_budget_s, progress)
            findings = None
            if with_sweeps:
                findings = sweeps.run_sweeps(plan.swept, stack.addresses, progress)
    return Outcome(contest, repeats, ratios, parameters, findings)


def rows_of(contest: Contest) -> list[Row]:
    """All lines, temperature by temperature."""
    floor = contest.floor
    rows: list[Row] = []
    for temperature in contest.temperatures:
        mine = [
            measured(
                method,
                temperature,
                contest.texts[method, temperature],
                contest.texts[_plain(method), temperature],
                floor,
            )
            for method in contest.methods
        ]
        efficiency = {
            row.gamma: row.block_efficiency
            for row in mine
            if row.name == f"{System.TANDEM} block" and row.gamma and row.block_efficiency
        }
        rows += [*mine, *floors(floor, contest.bandwidth, {0: 1.0, **efficiency}, temperature)]
    return rows


def _plain(method: Method) -> Method:
    """The same system and dtype without drafts."""
    if method.system is System.TANDEM:
        return Method(System.TANDEM, method.dtype)
    return Method(System.GENERATE, dtypes_of(method.dtype)[0])


def show(plan: Plan, outcome: Outcome, rows: Sequence[Row], console: Console) -> None:
    """Print all tables."""
    contest = outcome.contest
    title = (
        f"demo target expanded to {outcome.target_parameters / 1e6:.0f} M parameters, demo drafter;"
        f" {outcome.repeats} texts of {plan.new_tokens} tokens a line, medians of texts"
    )
    console.print(title)
    console.print(report.table(rows))
    for sentence in report.sentences(contest.floor, contest.bandwidth):
        console.print(sentence)
    for ratio in outcome.ratios:
        console.print(str(ratio))
    for table in outcome.findings.tables() if outcome.findings else ():
        console.print(table)


def as_json(plan: Plan, outcome: Outcome, rows: Sequence[Row]) -> dict[str, Any]:
    """What goes into the JSON file."""
    contest, last = outcome.contest, outcome.repeats - 1
    return {
        "environment": describe(),
        "plan": asdict(plan),
        "target_parameters": outcome.target_parameters,
        "repeats": outcome.repeats,
        "seeds": f"0 to {last}, the number of the repeat, for every system",
        "stages": report.stages(contest.floor, contest.bandwidth),
        "rows": [asdict(row) for row in rows],
        "run_off": [asdict(ratio) for ratio in outcome.ratios],
        "sweeps": outcome.findings.as_json() if outcome.findings else None,
    }


def main() -> None:
    """Measure, print, and write benchmarks/results/bench-<time>.{json,txt} and plots."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sweeps", action="store_true", help="also the sweeps, with plots")
    parser.add_argument("--quick", action="store_true", help="a minute-long smoke run")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    args = parser.parse_args()
    plan = QUICK if args.quick else FULL
    try:
        with Progress(console=Console(stderr=True)) as progress:
            outcome = run(plan, args.sweeps, progress)
    except Failure as failure:
        parser.exit(1, "\n".join((*failure.details, f"bench: {failure}\n")))
    rows = rows_of(outcome.contest)
    console = Console(record=True, width=_WIDTH)
    show(plan, outcome, rows, console)
    args.results.mkdir(parents=True, exist_ok=True)
    stem = args.results / f"bench-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    stem.with_suffix(".json").write_text(json.dumps(as_json(plan, outcome, rows), indent=2) + "\n")
    stem.with_suffix(".txt").write_text(console.export_text())
    if outcome.findings is not None:
        draw(outcome.findings.as_json(), stem)
    console.print(f"written to {stem}.json")


if __name__ == "__main__":
    main()

"""Compare Tandem with its alternatives, and with the physical limit, in one run.

    python -m benchmarks.bench            the table, within 20 minutes on 2 cores
    python -m benchmarks.bench --sweeps   also concurrency, support size, recorded rows, delay
    python -m benchmarks.bench --quick    a minute, to see that everything works

The pair is the embedded drafter and the embedded target expanded to 90 M parameters, so that both
acceptance and cost are real (docs/benchmark.md). Writes a table and a JSON file to
benchmarks/results/.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import Progress

from benchmarks.bench import report
from benchmarks.bench.floor import Floor
from benchmarks.bench.row import DEFAULTS, Row, floors, measured
from benchmarks.measure.environment import RESULTS, keep, target_dtype
from benchmarks.measure.services import serving
from benchmarks.peers import plan as sizes
from benchmarks.peers.installation import checkpoints, prompts_of
from benchmarks.peers.plan import Plan
from benchmarks.peers.roster import SERVICES, TRANSFORMERS, Roster, telling
from benchmarks.peers.spread import Spread, best_gammas, ratios
from benchmarks.peers.turns import Choices, Found, Turns, jobs_of, speeds
from benchmarks.peers.way import Way
from benchmarks.sweep import sweeps
from benchmarks.sweep.plots import draw
from tandem.failure import Failure
from tandem.tools.load.timeline import Timeline
from tandem.tools.local.pair import Pair

FULL = replace(
    sizes.FULL, gammas=(2, 4, 8, 16), loads=((1, 128),), choosing_turns=12, budget_s=13 * 60
)
QUICK = replace(sizes.QUICK, gammas=(4,), loads=((1, 16),), choosing_turns=2, budget_s=45)
# Share of the budget for the table; the rest is for the run-off.
_TABLE = 0.65
_ASSISTED = "assisted"
# Most tokens that assisted generation drafts with its default settings.
_DEFAULT_GAMMA = 20
_ENGINES = (
    replace(SERVICES, rules=("token", "block", "greedy_block"), options=("--streamed",)),
    replace(TRANSFORMERS, rules=(_ASSISTED,), own=((DEFAULTS, _DEFAULT_GAMMA),)),
)
BLOCK = f"{SERVICES.name} block"
_BARE_ROUNDS = 5
# Wide enough for the table; the file gets the same text.
_WIDTH = 180


@dataclass(frozen=True)
class Ratio:
    """Speed of Tandem with block verification over another way, both at their best draft length.

    Attributes:
        temperature: of all texts.
        block: Tandem's way.
        other: the other way.
        block_tokens_per_s: median over texts.
        other_tokens_per_s: median over texts.
        ratio: of their speeds, text by text.
    """

    temperature: float
    block: Way
    other: Way
    block_tokens_per_s: float
    other_tokens_per_s: float
    ratio: Spread

    def __str__(self) -> str:
        return (
            f"temperature {self.temperature:g}: {self.block} is {self.ratio.median:.2f} x"
            f" {self.other} ({self.block_tokens_per_s:.1f} and {self.other_tokens_per_s:.1f}"
            f" tokens/s; {self.ratio.count} texts each, {self.ratio.low:.2f} to"
            f" {self.ratio.high:.2f} with {self.ratio.confidence:.0%})"
        )


@dataclass(frozen=True)
class Outcome:
    """What a run measured.

    Attributes:
        table: texts of all ways, by job.
        run_off: texts of the best way of each family, by job.
        floor: measured between the turns.
        versions: of transformers and of Tandem.
        findings: of the sweeps, if they were run.
    """

    table: Found
    run_off: Found
    floor: Floor
    versions: dict[str, dict[str, str]]
    findings: sweeps.Findings | None


def run(plan: Plan, with_sweeps: bool) -> Outcome:
    """Measure everything.

    Raises:
        Failure: an engine failed; figures without its failed texts would flatter it.
    """
    dtype, jobs = target_dtype(), jobs_of(plan)
    roster = Roster()
    with telling() as say:
        try:
            target = roster.load(plan, _ENGINES, dtype, say)
            folders = checkpoints(plan, say)
            floor = Floor(folders["drafter"], target, dtype, (0, *plan.gammas))

            def between() -> None:
                require_all(roster)
                floor.measure(_BARE_ROUNDS)

            turns = Turns(roster, prompts_of(target), say, between)
            turns.warm_up(jobs)
            every = {job: roster.ways(job.texts) for job in jobs}
            table = turns.write("table", every, plan.choosing_turns, _TABLE * plan.budget_s)
            choices: Choices = {job: best_gammas(speeds(table[job])) for job in jobs}
            run_off = turns.measure(plan, choices, (1 - _TABLE) * plan.budget_s)
            require_all(roster)
        finally:
            roster.close()
    findings = None
    if with_sweeps:
        pair = Pair(target, folders["drafter"], dtype=dtype, drafter_dtype="auto")
        with serving(pair) as stack, Progress(console=Console(stderr=True)) as progress:
            findings = sweeps.run_sweeps(plan_of(plan), stack.addresses, progress)
    return Outcome(table, run_off, floor, roster.versions, findings)


def require_all(roster: Roster) -> None:
    """Check that no engine has failed.

    Raises:
        Failure: some have; says which, and why.
    """
    if roster.failures:
        raise Failure("; ".join(f"{name}: {why}" for name, why in roster.failures.items()))


def plan_of(plan: Plan) -> sweeps.Sweeps:
    """The sizes of the sweeps that belong to a plan."""
    return sweeps.QUICK if plan is QUICK else sweeps.FULL


def rows_of(table: Found, floor: Floor) -> list[Row]:
    """All rows, temperature by temperature."""
    rows: list[Row] = []
    for job, ways in table.items():
        texts: dict[Way, list[Timeline]] = {
            way: [text for one in found for text in one.timelines] for way, found in ways.items()
        }
        mine = [
            measured(way, job.temperature, own, texts[Way(way.engine, 0)], floor)
            for way, own in texts.items()
        ]
        efficiency = {
            row.gamma: row.block_efficiency
            for row in mine
            if row.name == BLOCK and row.block_efficiency
        }
        rows += [*mine, *floors(floor, {0: 1.0, **efficiency}, job.temperature)]
    return rows


def ratios_of(run_off: Found) -> Iterator[Ratio]:
    """Ratios of block verification to every way of transformers."""
    for job, ways in run_off.items():
        rates = speeds(ways)
        (block,) = (way for way in ways if way.family == BLOCK)
        for other in ways:
            if other.engine == TRANSFORMERS.name:
                own, its = (median(rates[way].values()) for way in (block, other))
                spread = Spread.of(ratios(rates[block], rates[other]))
                yield Ratio(job.temperature, block, other, own, its, spread)


def show(outcome: Outcome, rows: list[Row], console: Console) -> None:
    """Print all tables."""
    floor, (job, *_) = outcome.floor, outcome.table
    count = min(len(found) for ways in outcome.table.values() for found in ways.values())
    console.print(
        f"demo target expanded to {floor.target_parameters / 1e6:.0f} M parameters in"
        f" {floor.dtype}, demo drafter; transformers in"
        f" {outcome.versions[TRANSFORMERS.name]['dtype']};"
        f" {count} texts of {job.new_tokens} tokens a line, medians of texts"
    )
    console.print(report.table(rows))
    for sentence in (report.sentence(floor), *map(str, ratios_of(outcome.run_off))):
        console.print(sentence)
    for table in outcome.findings.tables() if outcome.findings else ():
        console.print(table)


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
        outcome = run(plan, args.sweeps)
    except Failure as failure:
        parser.exit(1, "\n".join((*failure.details, f"bench: {failure}\n")))
    rows = rows_of(outcome.table, outcome.floor)
    console = Console(record=True, width=_WIDTH)
    show(outcome, rows, console)
    stem = args.results / f"bench-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    keep(
        stem.with_suffix(".json"),
        versions=outcome.versions,
        plan=asdict(plan),
        floor=outcome.floor.as_json(),
        rows=[asdict(row) for row in rows],
        run_off=[asdict(ratio) for ratio in ratios_of(outcome.run_off)],
        sweeps=outcome.findings.as_json() if outcome.findings else None,
    )
    stem.with_suffix(".txt").write_text(console.export_text())
    if outcome.findings is not None:
        draw(outcome.findings.as_json(), stem)
    console.print(f"written to {stem}.json")


if __name__ == "__main__":
    main()

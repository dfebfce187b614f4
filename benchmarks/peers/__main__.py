"""Tandem, vLLM, OpenVINO GenAI and transformers: which are fast, and which are exact.

    python -m benchmarks.peers              everything, some 30 minutes after setting up
    python -m benchmarks.peers --quick      a smaller target and few texts, to see that it works
    python -m benchmarks.peers --published chats    a published model with drafts by lookup; quotes:
                                            texts that repeat their prompts
    python -m benchmarks.peers --device cuda    on a GPU: a target of 7 B and a drafter of 0.4 B
                                            parameters, Tandem beside transformers

Engines are set up in .cache/peers, load the same pair, and write the same texts in turn.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console

from benchmarks.measure.environment import RESULTS, keep, result_file, target_dtype
from benchmarks.peers import report
from benchmarks.peers.installation import prompts_of
from benchmarks.peers.law import Law, compare
from benchmarks.peers.plan import FULL, GPU, PUBLISHED, QUICK, Plan
from benchmarks.peers.roster import (
    ENGINES,
    OF_PUBLISHED,
    ON_A_GPU,
    Engine,
    Roster,
    Say,
    named,
    telling,
)
from benchmarks.peers.turns import Choices, Found, Turns, jobs_of
from benchmarks.peers.way import Way

# Shares of the budget; the rest is for the laws.
_CHOOSING, _MEASURING = 0.25, 0.45
# Wide enough for the tables.
_WIDTH = 140


@dataclass(frozen=True)
class Outcome:
    """What a run found.

    Attributes:
        roster: the engines that took part, and those that could not.
        choosing: the texts that draft lengths were chosen by.
        choices: draft lengths by job and engine.
        measured: texts by job and way.
        laws: by engine.
        law_gammas: the draft length of each law's sample, by engine.
    """

    roster: Roster
    choosing: Found
    choices: Choices
    measured: Found
    laws: dict[str, Law]
    law_gammas: dict[str, int]


def run(plan: Plan, engines: tuple[Engine, ...], dtype: str, say: Say) -> Outcome:
    """Run everything, and stop all workers at the end."""
    roster = Roster()
    try:
        target = roster.load(plan, engines, dtype, say)
        return contest(plan, roster, prompts_of(target, plan.published), say)
    finally:
        roster.close()


def contest(plan: Plan, roster: Roster, prompts: list[tuple[int, ...]], say: Say) -> Outcome:
    """Choose draft lengths, measure, compare laws."""
    turns, jobs = Turns(roster, prompts, say), jobs_of(plan)
    turns.warm_up(jobs)
    choosing, choices = turns.choose(plan, jobs, plan.budget_s * _CHOOSING)
    roster.keep(
        way for way in roster.workers if not way.gamma or way.gamma in _chosen(choices, way.family)
    )
    measured = turns.measure(plan, choices, plan.budget_s * _MEASURING)
    gammas = law_gammas(choices, roster)
    left = plan.budget_s * (1 - _CHOOSING - _MEASURING)
    samples = turns.sample(plan, gammas, left)
    laws = {
        engine: compare(own[gammas[engine]], own[0])
        for engine, own in samples.items()
        if all(own.values())
    }
    return Outcome(roster, choosing, choices, measured, laws, gammas)


def _chosen(choices: Choices, family: str) -> set[int]:
    return {best[family] for best in choices.values() if family in best}


def law_gammas(choices: Choices, roster: Roster) -> dict[str, int]:
    """The shortest draft length that each engine was measured with at temperature 1."""
    found: dict[str, int] = {}
    for engine in roster.engines:
        sampled = [
            best[engine] for job, best in choices.items() if job.temperature and engine in best
        ]
        alive = [gamma for gamma in sampled if Way(engine, gamma) in roster.workers]
        if alive and Way(engine, 0) in roster.workers:
            found[engine] = min(alive)
    return found


def show(plan: Plan, outcome: Outcome, console: Console) -> None:
    """Print all tables."""
    for section in report.sections(outcome.measured, outcome.laws):
        console.print(report.table(section))
    laws, gammas = outcome.laws, outcome.law_gammas
    console.print(report.law_table(laws, gammas, plan.law_tokens))
    for name, reason in outcome.roster.failures.items():
        console.print(f"{name} took no part, or left: {reason}", markup=False)


def as_json(plan: Plan, dtype: str, outcome: Outcome) -> dict[str, Any]:
    """What goes into the JSON file."""
    roster = outcome.roster
    return {
        "versions": roster.versions,
        "plan": asdict(plan),
        "dtype": dtype,
        "failures": roster.failures,
        "draft_lengths": [{**asdict(job), "best": best} for job, best in outcome.choices.items()],
        "summary": [asdict(section) for section in report.sections(outcome.measured, outcome.laws)],
        "laws": {
            engine: {"gamma": outcome.law_gammas[engine], "p": law.p, "holds": law.holds}
            | asdict(law)
            for engine, law in outcome.laws.items()
        },
        "choosing": report.as_json(outcome.choosing),
        "measured": report.as_json(outcome.measured),
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="minutes, to see that it works")
    parser.add_argument("--engines", type=named, nargs="+", help="by name; default: all")
    parser.add_argument(
        "--device", default="cpu", help="of both models; cuda takes larger ones of usual shapes"
    )
    parser.add_argument(
        "--published",
        choices=("chats", "quotes"),
        default="",
        help="a published model, and prompts",
    )
    parser.add_argument("--texts", type=int, help="texts of each law's sample")
    parser.add_argument("--turns", type=int, help="most turns to measure")
    parser.add_argument("--budget-minutes", type=float, help="for all texts, once loaded")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the target")
    parser.add_argument("--note", default="", help="kept in the file: what else ran, say")
    parser.add_argument("--out", type=result_file, default=RESULTS / "peers.json")
    return parser.parse_args()


def plan_of(options: argparse.Namespace) -> Plan:
    """The plan that the command line asks for."""
    gpu = options.device != "cpu"
    plan = QUICK if options.quick else GPU if gpu else PUBLISHED if options.published else FULL
    minutes = options.budget_minutes
    changes: Mapping[str, Any] = {
        "device": options.device,
        "law_texts": options.texts,
        "published": options.published or None,
        "turns": options.turns,
        "budget_s": minutes * 60 if minutes else None,
    }
    return replace(plan, **{name: value for name, value in changes.items() if value is not None})


def main() -> None:
    """Measure, print, and write the file."""
    options = _options()
    plan, console = plan_of(options), Console(record=True, width=_WIDTH)
    dtype = options.dtype or target_dtype(plan.device)
    usual = ENGINES if plan.device == "cpu" else ON_A_GPU
    engines = options.engines or (OF_PUBLISHED if plan.published else usual)
    load_before = os.getloadavg()
    # A run that is ended ends its workers, of which all but one are stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with telling() as say:
        outcome = run(plan, tuple(engines), dtype, say)
    show(plan, outcome, console)
    found = {"note": options.note, "load_average": [load_before, os.getloadavg()]}
    keep(options.out, **found, **as_json(plan, dtype, outcome))
    options.out.with_suffix(".txt").write_text(console.export_text())
    console.print(f"written to {options.out}")


if __name__ == "__main__":
    main()

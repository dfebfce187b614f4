"""Trees and several drafts by exact expectation on recorded rounds of the embedded pair.

    python -m benchmarks.recorded_trees [--rounds 2016]

Texts are the target's own at temperature 1. Behind each, rounds begin at three places; nodes are
drawn there once for all methods, so that only the draws are left to chance, and are paired.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.measure.environment import RESULTS, ROOT, describe
from benchmarks.measure.texts import PROMPTS
from benchmarks.recorded_trees.comparisons import (
    ALONE,
    Case,
    Figure,
    Found,
    cases_of,
    compared,
    expected,
    figures_of,
    plan_of,
)
from benchmarks.recorded_trees.methods import Drafted
from benchmarks.recorded_trees.wire import SUPPORTS, Wire, wire_of
from benchmarks.sweep.branching import path_of
from benchmarks.sweep.expectation import STARTS
from benchmarks.sweep.recorded import Recorder
from tandem.tools.local.pair import embedded

LENGTH = 200
# Of a batch: each text's rows of all nodes take a megabyte and a half.
_TEXTS = 28
# As `python -m benchmarks.shapes calibrate` measures it.
_ACCEPTANCE = (0.74, 0.08, 0.035)


def measure(
    recorder: Recorder, rounds: int, boosted: Path | None, progress: Progress
) -> tuple[list[Figure], list[Found], list[Wire]]:
    """All cases on the same rounds, whose number is rounded up to whole batches of texts."""
    plan, drafts = plan_of(_ACCEPTANCE, boosted=boosted is not None)
    others = [] if boosted is None else [recorder.load(str(boosted))]
    cases = cases_of(drafts)
    sums: dict[Case, list[float]] = {case: [] for case in cases}
    texts = -(-rounds // len(STARTS))
    batches = -(-texts // _TEXTS)
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(batches)]
    samples = -(-texts // batches)
    wires: dict[int, list[Wire]] = {support: [] for support in SUPPORTS}
    for batch in recorder.texts(prompts, samples, LENGTH, progress):
        starts = [batch.prompt + int(LENGTH * share) for share in STARTS]
        total = dict.fromkeys(cases, torch.zeros(samples, dtype=torch.float64))
        for start in starts:
            grown = recorder.grow(batch.tokens[:, :start], plan.nodes, others)
            for case, tokens in expected(plan, drafts, grown, cases).items():
                total[case] = total[case] + tokens
            for support, each in wires.items():
                each.append(wire_of(drafts[ALONE], plan.nodes, grown, support))
        for case, tokens in total.items():
            sums[case] += tokens.tolist()

    def depth(drafted: Drafted) -> int:
        return max(len(path_of(plan.nodes, node)) for node in drafted.nodes)

    means = [Wire.mean(each) for each in wires.values()]
    return figures_of(drafts, sums, len(STARTS), depth), compared(sums), means


def show(
    console: Console, figures: Sequence[Figure], found: Sequence[Found], wires: Sequence[Wire]
) -> None:
    """Print the tables."""
    table = Table("draft", "nodes", "depth", "rule", "tokens a round")
    for each in sorted(figures, key=lambda figure: (figure.draft, figure.tokens)):
        tokens = f"{each.tokens:.3f} ± {each.tokens_se:.3f}"
        table.add_row(each.draft, str(each.nodes), str(each.depth), each.rule, tokens)
    console.print(table)
    ratios = Table("case", "over", "by", "bar", "")
    for row in found:
        bar = "" if row.bar is None else f"{row.bar - 1:+.0%}"
        met = {None: "", True: "met", False: "missed"}[row.met]
        by = f"{row.ratio - 1:+.1%} ± {row.ratio_se:.1%}"
        ratios.add_row(" ".join(row.case), " ".join(row.base), by, bar, met)
    console.print(ratios)
    for wire in wires:
        console.print(
            f"{ALONE}, at most {wire.support} tokens a row: {wire.bytes_a_round / 1000:.1f} kB a"
            f" round, {wire.overlap_lost:.2%} of the overlap lost"
        )


def main() -> None:
    """Measure, print, and write benchmarks/results/recorded_trees.json."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recorded_trees", description=__doc__
    )
    parser.add_argument("--rounds", type=int, default=2016, help="at least so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--boosted", type=Path, default=ROOT / "models" / "boosted")
    parser.add_argument("--out", type=Path, default=RESULTS / "recorded_trees.json")
    options = parser.parse_args()
    if options.rounds < 2 * len(STARTS):
        parser.error(f"--rounds must be at least {2 * len(STARTS)}, two texts, for standard errors")
    torch.set_num_threads(options.threads)
    boosted = options.boosted if options.boosted.exists() else None
    console = Console()
    if boosted is None:
        console.print(f"no second drafter at {options.boosted}: forests are left out")
    recorder = Recorder(embedded("drafter"), embedded("target"), options.seed)
    with Progress(console=console) as progress:
        figures, found, wires = measure(recorder, options.rounds, boosted, progress)
    show(console, figures, found, wires)
    result = {
        "environment": describe(),
        "rounds": options.rounds,
        "seed": options.seed,
        "figures": [asdict(each) for each in figures],
        "comparisons": [asdict(each) for each in found],
        "wire": [asdict(each) for each in wires],
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Every drafting method by every rule that takes it, through the services, in turn.

    python -m benchmarks.methods [--turns 9] [--only tree chains]

One stack a method, all of them up at once, and texts of 200 tokens one by one: a turn has a text of
each case, so that a machine whose speed changes does so for all. Speeds are medians over turns. At
temperature 0 a text ends where eight tokens in a row come for the third time: small models loop,
and what repeats itself is easy to draft.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

import grpc
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.measure.environment import RESULTS, ROOT, describe
from benchmarks.measure.greedy import greedy_lengths
from benchmarks.measure.prompts import PROMPTS
from benchmarks.measure.ratio import ratio
from benchmarks.measure.services import drafting
from tandem.failure import Failure
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.tools.local.pair import Pair

NEW_TOKENS = 200
# What a pass of the target over one row takes, in passes of the drafter.
COST_RATIOS = (5, 20, 100)


@dataclass(frozen=True, eq=False)
class Way:
    """A drafter, and what is asked of it.

    Attributes:
        name: of the method.
        settings: of the drafter, without their prefix.
        rules: that decide its drafts.
        sizes: depth and nodes; nodes are None for chains.
        parts: models that draft, each with a pass a level.
    """

    name: str
    settings: dict[str, str]
    rules: tuple[str, ...]
    sizes: tuple[tuple[int, int | None], ...]
    parts: int = 1


WAYS = (
    Way("model", {}, ("token", "block"), ((0, None), (4, None), (8, None), (16, None))),
    Way("tree", {"METHOD": "tree"}, ("token", "block"), ((4, 8), (4, 16), (8, 16))),
    Way(
        "chains",
        {"METHOD": "chains", "CHAINS": "4"},
        ("token", "block", "spectr", "gbv"),
        ((4, 16),),
    ),
    Way(
        "forest",
        {"METHOD": "forest", "SECOND_MODEL": str(ROOT / "models" / "boosted")},
        ("token", "block"),
        ((4, 16),),
        parts=2,
    ),
)


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    way: Way
    rule: str
    depth: int
    nodes: int | None
    temperature: float


@dataclass
class Texts:
    """What the texts of a case showed, one entry a text."""

    emitted: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)
    levels: list[float] = field(default_factory=list)
    nodes: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    speed: list[float] = field(default_factory=list)
    pass_ms: list[float] = field(default_factory=list)
    beside_ms: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Figure:
    """A case's figures a round; the error is over texts.

    Attributes:
        tokens: emitted, accepted + 1.
        draft_passes: of the drafter's models.
        target_rows: places of the target's pass, twins included.
        draft_bytes: of the drafts' distributions on the wire, each way of two.
        pass_ms: of the target over those rows, median.
        beside_ms: of a round beside both models, median.
        speed: tokens a second, median.
        predicted: tokens a second by these times, were a pass of the drafter's models `COST_RATIOS`
            times shorter than the target's over one row.
    """

    method: str
    rule: str
    depth: int
    nodes: int
    temperature: float
    tokens: float
    tokens_se: float
    draft_passes: float
    target_rows: float
    draft_bytes: float
    pass_ms: float
    beside_ms: float
    speed: float
    predicted: tuple[float, ...] = ()


def cases_of(way: Way) -> list[Case]:
    """A chain of length 0 is plain decoding, by one rule."""
    return [
        Case(way, rule, depth, nodes, temperature)
        for temperature in (0.0, 1.0)
        for depth, nodes in way.sizes
        for rule in (way.rules if depth else way.rules[-1:])
    ]


def add(texts: Texts, stub: Any, case: Case, seed: int, greedy: Sequence[int]) -> None:
    """One text of a case.

    Args:
        greedy: length of each prompt's text at temperature 0.
    """
    number = seed % len(PROMPTS)
    length = NEW_TOKENS if case.temperature else greedy[number]
    message = pb.Generation(
        prompt=PROMPTS[number],
        stopping=pb.Stopping(max_new_tokens=length, ignore_eos=True),
        speculation=pb.Speculation(verifier=case.rule, gamma=case.depth, max_nodes=case.nodes),
    )
    message.sampling.seed = seed
    message.sampling.temperature = case.temperature
    began = time.perf_counter()
    summary = stub.Complete(pb.CompleteRequest(generation=message), timeout=300).summary
    seconds = time.perf_counter() - began
    if summary.drafter_lost:
        raise RuntimeError(f"{case.way.name}: the drafter was lost in a text")
    rounds = summary.rounds - 1  # without the prefill
    texts.emitted.append(float(summary.new_tokens - 1))
    texts.rounds.append(float(rounds))
    texts.levels.append(float(sum(summary.gammas)))
    texts.nodes.append(float(sum(summary.nodes)))
    texts.sent.append(float(summary.draft_bytes))
    texts.speed.append(summary.new_tokens / seconds)
    stages = summary.stages
    models = stages.draft_forward_busy_ns + stages.verify_forward_busy_ns
    waits = stages.draft_wait_ns + stages.verify_wait_ns
    texts.pass_ms.append(stages.verify_forward_busy_ns / rounds / 1e6)
    texts.beside_ms.append((waits - models) / rounds / 1e6)


def figure_of(case: Case, texts: Texts) -> Figure:
    """Summarise one case."""
    tokens, error = ratio(texts.emitted, texts.rounds)
    rounds = sum(texts.rounds)
    passes = case.way.parts * sum(texts.levels) / rounds
    return Figure(
        case.way.name,
        case.rule,
        case.depth,
        case.nodes or case.depth,
        case.temperature,
        tokens,
        error,
        passes,
        1 + sum(texts.nodes) / rounds,
        sum(texts.sent) / rounds,
        median(texts.pass_ms),
        median(texts.beside_ms),
        median(texts.speed),
    )


def predict(figures: Sequence[Figure]) -> list[Figure]:
    """What each figure would be beside drafters of other costs; nothing without plain decoding."""
    plain = [one.pass_ms for one in figures if not one.depth]
    if not plain:
        return list(figures)
    row_ms = median(plain)
    return [
        replace(
            one,
            predicted=tuple(
                1e3 * one.tokens / (one.pass_ms + one.beside_ms + one.draft_passes * row_ms / cost)
                for cost in COST_RATIOS
            ),
        )
        for one in figures
    ]


def measure(ways: Sequence[Way], turns: int, console: Console) -> list[Figure]:
    """All cases in turn; a method that this checkout cannot serve is left out, and said."""
    with ExitStack() as running, Progress(console=console) as bar:
        stubs: list[tuple[Way, Any]] = []
        for way in ways:
            try:
                stack = running.enter_context(drafting(Pair(), way.settings))
            except Failure as failure:
                console.print(f"{way.name} is left out: {failure}")
                continue
            channel = running.enter_context(grpc.insecure_channel(stack.addresses["orchestrator"]))
            stubs.append((way, orchestrator_pb2_grpc.OrchestratorServiceStub(channel)))
        cases = [(case, stub) for way, stub in stubs for case in cases_of(way)]
        found = {case: Texts() for case, _ in cases}
        greedy = greedy_lengths(cases[0][1], NEW_TOKENS)
        task = bar.add_task("turns", total=(turns + 1) * len(cases))
        for turn in range(-1, turns):  # the first one warms
            for case, stub in cases:
                add(found[case] if turn >= 0 else Texts(), stub, case, max(turn, 0), greedy)
                bar.advance(task)
            if not console.is_terminal:
                console.print(f"turn {turn + 1} of {turns}")
    return predict([figure_of(case, texts) for case, texts in found.items()])


def show(console: Console, figures: Sequence[Figure]) -> None:
    """Print the table."""
    head = ("T", "method", "depth", "nodes", "rule", "tokens a round", "draft passes", "rows")
    costs = (f"1:{cost}" for cost in COST_RATIOS)
    table = Table(*head, "bytes", "pass ms", "beside ms", "tokens/s", *costs)
    for f in sorted(figures, key=lambda f: f.temperature):
        table.add_row(
            f"{f.temperature:g}",
            f.method,
            str(f.depth),
            str(f.nodes),
            f.rule,
            f"{f.tokens:.2f} ± {f.tokens_se:.2f}",
            f"{f.draft_passes:.1f}",
            f"{f.target_rows:.1f}",
            f"{f.draft_bytes:.0f}",
            f"{f.pass_ms:.2f}",
            f"{f.beside_ms:.2f}",
            f"{f.speed:.0f}",
            *(f"{speed:.0f}" for speed in f.predicted),
        )
    console.print(table)


def main() -> None:
    """Measure, print, and write benchmarks/results/methods.json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.methods", description=__doc__)
    parser.add_argument("--turns", type=int, default=9, help="texts of each case")
    names = [way.name for way in WAYS]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    options = parser.parse_args()
    if options.turns < 2:
        parser.error("--turns must be at least 2, for standard errors")
    console = Console(width=150)
    figures = measure([way for way in WAYS if way.name in options.only], options.turns, console)
    show(console, figures)
    result = {
        "environment": describe(),
        "turns": options.turns,
        "figures": [asdict(figure) for figure in figures],
    }
    (RESULTS / "methods.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

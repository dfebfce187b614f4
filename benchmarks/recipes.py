"""Tokens a round of drafting recipes, in a drafter and inside the target.

    python -m benchmarks.recipes [--only medusa eagle] [--heads FOLDER ...] [--tokens 10000]

Texts of the embedded target at temperature 1, decided by `token`: trees of 16 nodes and depth 4,
and a chain of 4. All recipes run one after the other in one run. Standard errors are over texts.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import grpc
from rich.console import Console
from rich.progress import Progress

from benchmarks.measure.environment import RESULTS, keep
from benchmarks.measure.ratio import ratio
from benchmarks.measure.services import serving
from benchmarks.measure.tables import table_of
from benchmarks.measure.texts import asked, summaries
from tandem.drafting.methods import METHODS
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.speculation.nodes import DraftShape
from tandem.tools.load.generator import LoadGenerator
from tandem.tools.local.pair import EMBEDDED_HEADS, Pair, embedded
from tandem.tools.local.process import ROOT
from tandem.tools.local.stack import Stack

NEW_TOKENS, DEPTH, RULE = 250, 4, "token"
_CONCURRENCY = 2
RECIPES = ("model", "tree", "medusa", "hydra", "eagle")


@dataclass(frozen=True)
class Line:
    """A recipe in a place; times and bytes are of a round."""

    recipe: str
    place: str
    parameters: int
    nodes: float
    tokens: float
    tokens_se: float
    overlap: float
    draft_ms: float
    draft_bytes: float
    feedback_bytes: float


def line_of(recipe: str, place: str, parameters: int, found: Sequence[pb.Summary]) -> Line:
    """Summarise the texts of a case. Rounds that drafted nothing count: a recipe that has nothing
    to draft from pays for it."""
    rounds = [float(summary.rounds) for summary in found]
    # The first token came with the prefill.
    emitted = [float(summary.new_tokens - 1) for summary in found]
    overlap, _ = ratio([s.overlap_sum for s in found], [float(s.overlap_positions) for s in found])

    def each(*fields: str) -> float:
        return sum(
            float(getattr(part, field))
            for summary in found
            for field in fields
            for part in [summary.stages if field.endswith("_ns") else summary]
        ) / sum(rounds)

    return Line(
        recipe,
        place,
        parameters,
        each("drafted_tokens"),
        *ratio(emitted, rounds),
        overlap,
        each("draft_forward_busy_ns", "draft_draw_busy_ns") / 1e6,
        each("draft_bytes"),
        each("feedback_bytes"),
    )


def _is_there(recipe: str) -> bool:
    """Whether the embedded target has the head of a recipe, or it needs none."""
    return recipe not in EMBEDDED_HEADS or (ROOT / "models" / recipe / "config.json").is_file()


def pair_of(recipe: str, inside: bool) -> Pair:
    """A built-in recipe, or the folder of a head."""
    if recipe in RECIPES:
        return Pair(recipe=recipe, inside=inside)
    return Pair(target=embedded("target"), drafter=recipe, inside=inside)


async def measure(stack: Stack, recipe: str, place: str, nodes: int, texts: int) -> Line:
    """One recipe in one place."""
    address = stack.addresses["orchestrator"]
    chain = recipe in METHODS and METHODS[recipe].drafter.shape is DraftShape.CHAIN
    budget = None if chain else nodes
    async with grpc.aio.insecure_channel(address) as channel:
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        info = await stub.GetModelInfo(pb.GetModelInfoRequest())
    async with LoadGenerator(address) as generator:
        wanted = [
            asked(seed, NEW_TOKENS, verifier=RULE, gamma=DEPTH, max_nodes=budget)
            for seed in range(texts)
        ]
        done = await generator.closed_loop(wanted, _CONCURRENCY)
    return line_of(Path(recipe).name, place, info.drafter.parameters, summaries(done))


def main() -> None:
    """Measure, print and write benchmarks/results/recipes.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        default=[name for name in RECIPES if _is_there(name)],
        choices=RECIPES,
        metavar="RECIPE",
        help=f"of {', '.join(RECIPES)}; default: those whose head is there",
    )
    parser.add_argument(
        "--heads", nargs="+", default=[], metavar="FOLDER", help="further heads of the target"
    )
    parser.add_argument("--tokens", type=int, default=10_000, help="of each case")
    parser.add_argument("--nodes", type=int, default=16, help="of a tree")
    options = parser.parse_args()
    console = Console(width=140)
    texts = -(-options.tokens // NEW_TOKENS)
    lines: list[Line] = []
    with Progress(console=console) as bar:
        cases = list(product([*options.only, *options.heads], (False, True)))
        for recipe, inside in bar.track(cases, description="recipes"):
            with serving(pair_of(recipe, inside)) as stack:
                place = "target" if inside else "drafter"
                lines.append(asyncio.run(measure(stack, recipe, place, options.nodes, texts)))
    console.print(table_of(map(asdict, lines)))
    keep(RESULTS / "recipes.json", rule=RULE, depth=DEPTH, lines=[asdict(line) for line in lines])


if __name__ == "__main__":
    main()

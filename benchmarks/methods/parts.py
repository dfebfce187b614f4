"""Tokens a second of a target that drafts with a part of itself, beside plain decoding, in turn.

    python -m benchmarks.methods.parts --target DIR (--exit 3 | --skip FILE) [--inside] [--turns 7]

The target decodes by its fastest back end. Each turn generates the same texts plainly and with
drafts of 4 tokens, at temperature 1 by `block` and at temperature 0; figures are medians over turns
and the median of their ratios. Give a target whose layers cost something: the embedded one expanded
(`python -m benchmarks.expand`).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
from rich.console import Console
from rich.progress import Progress

from benchmarks.measure.environment import RESULTS, keep
from benchmarks.measure.services import serving
from benchmarks.measure.tables import table_of
from benchmarks.measure.texts import asked
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.tools.local.pair import Pair
from tandem.tools.local.stack import Stack

GAMMA, NEW_TOKENS, TEXTS = 4, 96, 2


@dataclass(frozen=True)
class Speed:
    """At a temperature.

    Attributes:
        plain: tokens a second without drafts.
        drafted: with drafts.
        ratio: the median of both, turn by turn.
        tokens: a round.
        overlap: of the part's rows with the target's.
    """

    temperature: float
    plain: float
    drafted: float
    ratio: float
    tokens: float
    overlap: float


async def measure(stack: Stack, turns: int, progress: Progress) -> list[Speed]:
    """Both temperatures."""
    found = []
    async with grpc.aio.insecure_channel(stack.addresses["orchestrator"]) as channel:
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)

        async def texts(gamma: int, temperature: float) -> tuple[float, list[pb.Summary]]:
            since, summaries = time.perf_counter(), []
            for seed in range(TEXTS):
                request = asked(seed, NEW_TOKENS, temperature, gamma=gamma, verifier="block")
                reply = await stub.Complete(pb.CompleteRequest(generation=request))
                summaries.append(reply.summary)
            return TEXTS * NEW_TOKENS / (time.perf_counter() - since), summaries

        for temperature in (0.0, 1.0):
            speeds: tuple[list[float], list[float]] = ([], [])
            summaries: list[pb.Summary] = []
            for _ in progress.track(range(turns + 1), description=f"temperature {temperature:g}"):
                for place, gamma in enumerate((0, GAMMA)):
                    speed, summaries = await texts(gamma, temperature)
                    speeds[place].append(speed)
            plain, drafted = (own[1:] for own in speeds)  # the first turn warms up
            found.append(
                Speed(
                    temperature,
                    statistics.median(plain),
                    statistics.median(drafted),
                    statistics.median(d / p for p, d in zip(plain, drafted, strict=True)),
                    sum(s.new_tokens - 1 for s in summaries) / sum(s.rounds for s in summaries),
                    sum(s.overlap_sum for s in summaries)
                    / sum(s.overlap_positions for s in summaries),
                )
            )
    return found


def main() -> None:
    """Measure, print and write benchmarks/results/parts-NAME.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True, metavar="DIR")
    parser.add_argument("--exit", type=int, default=0, help="layers of the part")
    parser.add_argument("--skip", type=Path, metavar="FILE", help="sublayers left out of the part")
    parser.add_argument("--inside", action="store_true", help="the target's process drafts")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--name", default="", help="of the result; by default the target's")
    options = parser.parse_args()
    model = str(options.target)
    pair = Pair(target=model, drafter=model, recipe="model", inside=options.inside)
    skip = {"SKIP": str(options.skip.absolute())} if options.skip else {}
    drafter = {"EXIT": str(options.exit), **skip}
    console = Console(width=100)
    with Progress(console=console) as progress, serving(pair, {"drafter": drafter}) as stack:
        lines = asyncio.run(measure(stack, options.turns, progress))
    console.print(table_of(map(asdict, lines)))
    name = options.name or options.target.name
    told = {"exit": options.exit, "skip": bool(options.skip), "inside": options.inside}
    keep(RESULTS / f"parts-{name}.json", gamma=GAMMA, **told, lines=[asdict(x) for x in lines])


if __name__ == "__main__":
    main()

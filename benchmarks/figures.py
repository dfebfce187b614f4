"""Overlap, block efficiency and the time beside the models, for the embedded pair.

    python -m benchmarks.figures [--tokens 20000]

Texts at temperature 1, through the three services. Differences of block efficiency under
2 % are within the noise of free-running texts at this size; the standard errors say so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median

import grpc
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.measure.environment import RESULTS, describe
from benchmarks.measure.prompts import PROMPTS
from benchmarks.measure.ratio import ratio
from benchmarks.measure.services import serving
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.tools.local.pair import Pair

NEW_TOKENS = 250
CASES = tuple((verifier, gamma) for gamma in (4, 8) for verifier in ("token", "block"))
_CONCURRENCY = 4


@dataclass
class Sample:
    """What one text showed.

    Attributes:
        emitted: tokens of each full-length round, accepted + 1.
        drafted: tokens drafted in those rounds.
        overlap_sum: Σ min(p, q) over drafted positions whose context was emitted.
        overlap_positions: how many.
        beside_ns: wall time less forward passes, of each drafted round.
    """

    emitted: list[int] = field(default_factory=list)
    drafted: int = 0
    overlap_sum: float = 0.0
    overlap_positions: int = 0
    beside_ns: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Figure:
    """A row of the table; standard errors are over texts."""

    verifier: str
    gamma: int
    tokens: int
    block_efficiency: float
    block_efficiency_se: float
    acceptance: float
    acceptance_se: float
    overlap: float
    overlap_se: float


async def generate(stub: object, seed: int, verifier: str, gamma: int) -> Sample:
    """One text at temperature 1."""
    message = pb.Generation(
        prompt=PROMPTS[seed % len(PROMPTS)],
        stopping=pb.Stopping(max_new_tokens=NEW_TOKENS, ignore_eos=True),
        speculation=pb.Speculation(verifier=verifier, gamma=gamma),
    )
    message.sampling.seed = seed
    sample = Sample()
    # The stub's own type differs between grpcio's sync and async halves.
    call = stub.Generate(pb.GenerateRequest(generation=message))  # type: ignore[attr-defined]
    async for event in call:
        # A shorter draft is one that the end of the text cut.
        if event.HasField("round") and event.round.gamma == gamma:
            sample.emitted.append(len(event.round.tokens))
            sample.drafted += gamma
    summary = event.summary
    sample.overlap_sum = summary.overlap_sum
    sample.overlap_positions = summary.overlap_positions
    stages = summary.stages
    pairs = zip(stages.round_wall_ns, stages.round_model_ns, strict=True)
    sample.beside_ns = [wall - model for wall, model in pairs]
    return sample


def figure_of(verifier: str, gamma: int, samples: Sequence[Sample]) -> Figure:
    """Summarise one case."""
    emitted = [float(sum(s.emitted)) for s in samples]
    rounds = [float(len(s.emitted)) for s in samples]
    accepted = [e - r for e, r in zip(emitted, rounds, strict=True)]
    efficiency = ratio(emitted, rounds)
    acceptance = ratio(accepted, [float(s.drafted) for s in samples])
    overlap = ratio([s.overlap_sum for s in samples], [float(s.overlap_positions) for s in samples])
    return Figure(verifier, gamma, len(samples) * NEW_TOKENS, *efficiency, *acceptance, *overlap)


async def measure(address: str, tokens: int, bar: Progress) -> tuple[list[Figure], list[float]]:
    """All cases, then single texts for the time beside the models, in milliseconds."""
    texts = -(-tokens // NEW_TOKENS)
    task = bar.add_task("texts", total=texts * len(CASES) + len(PROMPTS))
    async with grpc.aio.insecure_channel(address) as channel:
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        places = asyncio.Semaphore(_CONCURRENCY)

        async def one(seed: int, verifier: str, gamma: int) -> Sample:
            async with places:
                sample = await generate(stub, seed, verifier, gamma)
            bar.advance(task)
            return sample

        figures = []
        for verifier, gamma in CASES:
            samples = await asyncio.gather(*(one(seed, verifier, gamma) for seed in range(texts)))
            figures.append(figure_of(verifier, gamma, samples))
        beside: list[float] = []
        for seed in range(len(PROMPTS)):
            alone = await one(seed, "block", 4)
            beside += [nanoseconds / 1e6 for nanoseconds in alone.beside_ns]
    return figures, beside


def show(console: Console, figures: Sequence[Figure], beside: Sequence[float]) -> None:
    """Print the table."""
    table = Table("verifier", "gamma", "tokens", "block efficiency", "acceptance", "overlap")
    for f in figures:
        table.add_row(
            f.verifier,
            str(f.gamma),
            str(f.tokens),
            f"{f.block_efficiency:.3f} ± {f.block_efficiency_se:.3f}",
            f"{f.acceptance:.3f} ± {f.acceptance_se:.3f}",
            f"{f.overlap:.3f} ± {f.overlap_se:.3f}",
        )
    console.print(table)
    for token, block in zip(figures[::2], figures[1::2], strict=True):
        gain = block.block_efficiency / token.block_efficiency
        error = gain * np.hypot(
            block.block_efficiency_se / block.block_efficiency,
            token.block_efficiency_se / token.block_efficiency,
        )
        console.print(f"block over token at gamma {token.gamma}: {gain - 1:+.1%} ± {error:.1%}")
    console.print(
        f"time beside the models, one sequence, gamma 4: p50 {median(beside):.2f} ms,"
        f" p95 {np.percentile(beside, 95):.2f} ms a round ({len(beside)} rounds)"
    )


def main() -> None:
    """Start the services, measure, print and write benchmarks/results/figures.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=20_000, help="tokens of each case")
    tokens = parser.parse_args().tokens
    console = Console()
    with serving(Pair()) as stack, Progress(console=console) as bar:
        figures, beside = asyncio.run(measure(stack.addresses["orchestrator"], tokens, bar))
    show(console, figures, beside)
    RESULTS.mkdir(exist_ok=True)
    result = {
        "environment": describe(),
        "figures": [asdict(figure) for figure in figures],
        "beside_the_models_ms": {
            "p50": median(beside),
            "p95": float(np.percentile(beside, 95)),
            "rounds": len(beside),
        },
    }
    (RESULTS / "figures.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

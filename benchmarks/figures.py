"""Overlap, block efficiency and the time beside the models, for the embedded pair.

    python -m benchmarks.figures [--tokens 20000]

Texts at temperature 1, through the three services. Differences of block efficiency under
2 % are within the noise of free-running texts at this size; the standard errors say so.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.measure.environment import RESULTS, keep
from benchmarks.measure.ratio import ratio
from benchmarks.measure.services import serving
from benchmarks.measure.texts import PROMPTS, asked, summaries
from tandem.tools.load.generator import LoadGenerator
from tandem.tools.load.timeline import Timeline
from tandem.tools.local.pair import Pair

NEW_TOKENS = 250
CASES = tuple((verifier, gamma) for gamma in (4, 8) for verifier in ("token", "block"))
_CONCURRENCY = 4


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


def figure_of(verifier: str, gamma: int, texts: Sequence[Timeline]) -> Figure:
    """Summarise the texts of one case, by their rounds of full length.

    Raises:
        RuntimeError: a text failed.
    """
    found = summaries(texts)
    emitted, rounds = [], []
    for text, summary in zip(texts, found, strict=True):
        # A shorter draft is one that the end of the text cut.
        of_rounds = zip(text.arrivals, summary.gammas, strict=True)
        full = [tokens for (_, tokens), drafted in of_rounds if drafted == gamma]
        emitted.append(float(sum(full)))
        rounds.append(float(len(full)))
    accepted = [e - r for e, r in zip(emitted, rounds, strict=True)]
    return Figure(
        verifier,
        gamma,
        len(texts) * NEW_TOKENS,
        *ratio(emitted, rounds),
        *ratio(accepted, [gamma * r for r in rounds]),
        *ratio([s.overlap_sum for s in found], [float(s.overlap_positions) for s in found]),
    )


async def measure(address: str, tokens: int, bar: Progress) -> tuple[list[Figure], list[float]]:
    """All cases, then single texts for the time beside the models, in milliseconds."""
    count = -(-tokens // NEW_TOKENS)
    task = bar.add_task("texts", total=count * len(CASES) + len(PROMPTS))
    async with LoadGenerator(address) as generator:

        async def written(
            verifier: str, gamma: int, texts: int = count, at_once: int = _CONCURRENCY
        ) -> list[Timeline]:
            generations = [
                asked(seed, NEW_TOKENS, verifier=verifier, gamma=gamma) for seed in range(texts)
            ]
            return await generator.closed_loop(generations, at_once, lambda _: bar.advance(task))

        figures = [figure_of(*case, await written(*case)) for case in CASES]
        alone = await written("block", 4, texts=len(PROMPTS), at_once=1)
    return figures, [1e3 * s for text in alone for s in text.beside_models_s]


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
    p95 = float(np.percentile(beside, 95))
    keep(
        RESULTS / "figures.json",
        figures=[asdict(figure) for figure in figures],
        beside_the_models_ms={"p50": median(beside), "p95": p95, "rounds": len(beside)},
    )


if __name__ == "__main__":
    main()

"""Overlap and block efficiency of the embedded pair.

    python -m benchmarks.figures [--tokens 20000]

Texts at temperature 1, through the three services. At this number of texts, differences of block
efficiency under 2 % are noise, as the standard errors show.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from rich.console import Console
from rich.progress import Progress

from benchmarks.measure.environment import RESULTS, keep
from benchmarks.measure.ratio import ratio
from benchmarks.measure.services import serving
from benchmarks.measure.tables import table_of
from benchmarks.measure.texts import asked, summaries
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
        # A shorter draft was cut by the end of the text.
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


async def measure(address: str, tokens: int, bar: Progress) -> list[Figure]:
    """All cases, each with texts of `tokens` tokens in total."""
    seeds = range(-(-tokens // NEW_TOKENS))
    task = bar.add_task("texts", total=len(seeds) * len(CASES))
    figures = []
    async with LoadGenerator(address) as generator:
        for rule, gamma in CASES:
            generations = [asked(seed, NEW_TOKENS, verifier=rule, gamma=gamma) for seed in seeds]
            texts = await generator.closed_loop(
                generations, _CONCURRENCY, lambda _: bar.advance(task)
            )
            figures.append(figure_of(rule, gamma, texts))
    return figures


def show(console: Console, figures: Sequence[Figure]) -> None:
    """Print the table."""
    console.print(table_of(map(asdict, figures)))
    for token, block in zip(figures[::2], figures[1::2], strict=True):
        gain = block.block_efficiency / token.block_efficiency
        error = gain * np.hypot(
            block.block_efficiency_se / block.block_efficiency,
            token.block_efficiency_se / token.block_efficiency,
        )
        console.print(f"block over token at gamma {token.gamma}: {gain - 1:+.1%} ± {error:.1%}")


def main() -> None:
    """Start the services, measure, print and write benchmarks/results/figures.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=20_000, help="tokens of each case")
    tokens = parser.parse_args().tokens
    console = Console(width=130)
    with serving(Pair()) as stack, Progress(console=console) as bar:
        figures = asyncio.run(measure(stack.addresses["orchestrator"], tokens, bar))
    show(console, figures)
    keep(RESULTS / "figures.json", figures=[asdict(figure) for figure in figures])


if __name__ == "__main__":
    main()

"""Which tree to draw: acceptance by sibling rank, measured offline.

    python -m benchmarks.shapes calibrate [--drafter FOLDER] [--target FOLDER] [--texts 96]

At every position of texts of the target, siblings are drawn without replacement; the probability
that each is the one kept is computed exactly from the rule. Prints the setting to use, and the
expected tokens of trees of some sizes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from benchmarks.measure.environment import RESULTS, keep
from benchmarks.measure.ratio import ratio
from benchmarks.measure.tables import table_of
from benchmarks.measure.texts import PROMPTS
from benchmarks.sweep.recorded import Recorder
from models.evaluate import kept_by_rank
from tandem.drafting.decoders.shape import best, expected_tokens
from tandem.tools.local.pair import embedded

LENGTH = 200
SIZES = ((2, 4), (4, 4), (4, 8), (4, 16), (4, 32), (8, 8), (8, 16), (8, 32))
# Least acceptance of a rank: rarer siblings are noise, and never drawn.
_LEAST = 1e-3
# Rows per step, which take some megabytes in float64.
_CHUNK = 128


@dataclass(frozen=True)
class Rank:
    """How often the sibling of a rank is the one kept; the standard error is over texts."""

    rank: int
    acceptance: float
    acceptance_se: float


@dataclass(frozen=True)
class Size:
    """The tokens that the best tree within a size is expected to give per round."""

    depth: int
    nodes: int
    tokens: float


def setting_of(ranks: Sequence[Rank]) -> list[float]:
    """The setting: rounded acceptances, until one is tiny or larger than the one before."""
    found: list[float] = []
    for rank in ranks:
        share = round(rank.acceptance, 3)
        if share < _LEAST or (found and share > found[-1]):
            break
        found.append(share)
    return found


def measure(recorder: Recorder, texts: int, ranks: int, progress: Progress) -> list[Rank]:
    """Acceptance by rank at every position of texts of the target at temperature 1."""
    samples = -(-texts // len(PROMPTS))
    generator = torch.Generator().manual_seed(0)
    sums: list[list[float]] = [[] for _ in range(ranks)]
    for batch in recorder.texts(PROMPTS, samples, LENGTH, progress):
        p, q = recorder.rows(batch)
        found = torch.cat([kept_by_rank(*rows) for rows in _drawn(p, q, ranks, generator)])
        per_text = found.view(samples, LENGTH, ranks).sum(1)
        for each, column in zip(sums, per_text.T.tolist(), strict=True):
            each += column
    rounds = [float(LENGTH)] * len(sums[0])
    return [Rank(rank, *ratio(each, rounds)) for rank, each in enumerate(sums, 1)]


def _drawn(
    p: Tensor, q: Tensor, ranks: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for own, row in zip(torch.split(p, _CHUNK), torch.split(q, _CHUNK), strict=True):
        yield own, row, torch.multinomial(row, ranks, generator=generator)


def calibrate(options: argparse.Namespace) -> None:
    """Measure, print, and write benchmarks/results/shapes.json."""
    console = Console()
    recorder = Recorder(options.drafter, options.target)
    with Progress(console=console) as progress:
        ranks = measure(recorder, options.texts, options.ranks, progress)
    console.print(table_of(map(asdict, ranks)))
    setting = setting_of(ranks)
    sizes = [
        Size(depth, nodes, expected_tokens(best(setting, depth, nodes), setting))
        for depth, nodes in SIZES
    ]
    console.print(table_of(map(asdict, sizes)))
    console.print(f"TANDEM_DRAFTER_ACCEPTANCE={','.join(f'{share:g}' for share in setting)}")
    keep(
        RESULTS / "shapes.json",
        texts=options.texts,
        ranks=[asdict(rank) for rank in ranks],
        setting=setting,
        sizes=[asdict(size) for size in sizes],
    )


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shapes", description=__doc__)
    parser.add_argument("part", choices=["calibrate"])
    parser.add_argument("--drafter", default=embedded("drafter"), help="folder of a checkpoint")
    parser.add_argument("--target", default=embedded("target"), help="folder of a checkpoint")
    parser.add_argument("--texts", type=int, default=96, help="of 200 tokens")
    parser.add_argument("--ranks", type=int, default=6, help="siblings at each position")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if options.texts < 1 or not 1 <= options.ranks <= 16:
        parser.error("--texts must be at least 1, --ranks 1 to 16")
    torch.set_num_threads(options.threads)
    calibrate(options)


if __name__ == "__main__":
    main()

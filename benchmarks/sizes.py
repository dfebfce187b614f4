"""Sizes that follow what they earn, beside fixed ones: tokens/s of the embedded pair, in turn.

    python -m benchmarks.sizes [--texts 1 8 32] [--turns 5] [--trees]

Each turn asks every way for the same prompts and lengths, so many at a time. With --trees the
drafter makes trees, and 8 and 16 nodes at depth 4 are ways too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.measure.environment import RESULTS, describe
from benchmarks.measure.prompts import PROMPTS
from benchmarks.overhead import serving
from tandem.common.v1 import common_pb2
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.tools.load.generator import LoadGenerator
from tandem.tools.local.pair import embedded
from tandem.tools.local.process import ROOT

_NEW_TOKENS = 160


@dataclass(frozen=True)
class Way:
    """How texts are drafted; None leaves a size to the orchestrator."""

    gamma: int | None
    nodes: int | None = None

    def __str__(self) -> str:
        if self.gamma is None:
            return "auto"
        if not self.gamma:
            return "plain"
        return f"{self.nodes} nodes, depth {self.gamma}" if self.nodes else f"chain {self.gamma}"


AUTO, PLAIN = Way(None), Way(0)


@dataclass(frozen=True)
class Found:
    """One way in one turn.

    Attributes:
        way: as a table names it.
        texts: at once.
        turn: number of it.
        tokens_per_s: of all texts together.
        block_efficiency: tokens a round, prefill left out.
        sizes: how often rounds had each gamma and number of nodes.
    """

    way: str
    texts: int
    turn: int
    tokens_per_s: float
    block_efficiency: float
    sizes: dict[str, int]


async def measure(
    address: str, way: Way, texts: int, turn: int, count: int, temperature: float
) -> Found:
    """A closed loop of so many clients."""
    speculation = pb.Speculation(gamma=way.gamma, max_nodes=way.nodes)
    asked = [
        pb.Generation(
            prompt=PROMPTS[number % len(PROMPTS)],
            sampling=common_pb2.Sampling(temperature=temperature, seed=1000 * (turn + 1) + number),
            stopping=pb.Stopping(max_new_tokens=_NEW_TOKENS, ignore_eos=True),
            speculation=speculation,
        )
        for number in range(count)
    ]
    loop = asyncio.get_running_loop()
    async with LoadGenerator(address) as generator:
        began = loop.time()
        timelines = await generator.closed_loop(asked, texts)
        wall = loop.time() - began
    summaries = [timeline.summary for timeline in timelines if timeline.summary is not None]
    if len(summaries) < count:
        raise RuntimeError(f"{count - len(summaries)} texts failed")
    sizes = Counter(
        f"{gamma}/{nodes}"
        for summary in summaries
        for gamma, nodes in zip(summary.gammas[1:], summary.nodes[1:], strict=True)
    )
    tokens = sum(summary.new_tokens for summary in summaries)
    rounds = sum(summary.rounds - 1 for summary in summaries)
    return Found(
        str(way), texts, turn, tokens / wall, (tokens - count) / rounds, dict(sizes.most_common(8))
    )


def _table(found: list[Found], ways: list[Way]) -> Table:
    table = Table(
        "texts", "way", "tokens/s", "over plain", "auto over it", "tokens a round", "mostly",
        title="Tokens/s in turn, medians of ratios",
    )  # fmt: skip
    at = {(one.way, one.texts, one.turn): one for one in found}
    turns = sorted({one.turn for one in found})
    for texts in sorted({one.texts for one in found}):
        for way in map(str, ways):
            mine = [at[way, texts, turn] for turn in turns]
            plain, auto = (
                [at[other, texts, turn].tokens_per_s for turn in turns]
                for other in ("plain", "auto")
            )
            over = [one.tokens_per_s / other for one, other in zip(mine, plain, strict=True)]
            under = [other / one.tokens_per_s for one, other in zip(mine, auto, strict=True)]
            sizes = sum((Counter(one.sizes) for one in mine), Counter())
            table.add_row(
                str(texts),
                way,
                f"{median(one.tokens_per_s for one in mine):.0f}",
                f"{median(over):.2f}",
                f"{median(under):.2f}",
                f"{median(one.block_efficiency for one in mine):.2f}",
                ", ".join(f"{size} ({count})" for size, count in sizes.most_common(3)),
            )
    return table


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--texts", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--count", type=int, default=6, help="texts of one client in a turn")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--trees", action="store_true", help="the drafter makes trees")
    parser.add_argument("--target", type=Path, help="a target of your own; needs --drafter")
    parser.add_argument("--drafter", type=Path, help="its drafter")
    parser.add_argument("--out", type=Path, default=RESULTS / "sizes.json")
    options = parser.parse_args()
    ways = [PLAIN, Way(2), Way(4), Way(8), AUTO]
    if options.trees:
        ways = [PLAIN, Way(2, 2), Way(4, 4), Way(8, 8), Way(4, 8), Way(4, 16), AUTO]
    models: dict[str, Path | str] = {name: embedded(name) for name in ("target", "drafter")}
    if options.target:
        models = {"target": options.target.resolve(), "drafter": options.drafter.resolve()}
    drafter = {"METHOD": "tree"} if options.trees else {}
    found: list[Found] = []
    console = Console()
    with serving(ROOT, models, drafter=drafter) as (address, _):
        for texts in options.texts:
            for turn in range(-1, options.turns):  # the first one warms up, and auto learns
                for way in ways if turn % 2 else ways[::-1]:
                    count = options.count * texts
                    one = asyncio.run(
                        measure(address, way, texts, turn, count, options.temperature)
                    )
                    console.print(f"[dim]{texts} texts, {way}: {one.tokens_per_s:.0f} tokens/s[/]")
                    if turn >= 0:
                        found.append(one)
    console.print(_table(found, ways))
    rows = [asdict(one) for one in found]
    options.out.write_text(json.dumps({**describe(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()

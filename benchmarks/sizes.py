"""Adaptive draft sizes compared with fixed ones: tokens/s of the embedded pair, in turn.

    python -m benchmarks.sizes [--texts 1 8 32] [--turns 5] [--trees | --useless]
    python -m benchmarks.sizes --recovery [--texts 1 8]

In each turn every way gets the same prompts and lengths, --texts at a time. With --trees the
drafter makes trees, and 8 and 16 nodes at depth 4 are ways too. With --useless its distributions
are shifted to other tokens, so that hardly any is kept. With --recovery the drafter turns bad in
mid-run and good again. Texts of adaptive size are then written in turn with texts without drafts;
the first texts after a change are reported separately, since sizes must first adapt.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console

from benchmarks.measure.environment import RESULTS, keep, result_file
from benchmarks.measure.services import serving
from benchmarks.measure.tables import table_of
from benchmarks.measure.texts import asked, summaries
from benchmarks.simulated.shuffled import SHUFFLED
from tandem.tools.load.generator import LoadGenerator
from tandem.tools.local.pair import Pair

_NEW_TOKENS = 160
_MAX_LENGTH = 512
_TITLE = "Tokens/s in turn, medians of ratios"
_PHASES = ("good", "turned bad", "bad", "turned good", "good again")


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
CHAINS = (PLAIN, Way(2), Way(4), Way(8), AUTO)
USELESS = (PLAIN, Way(4), AUTO)  # longer drafts would only cost more
TREES = (PLAIN, Way(2, 2), Way(4, 4), Way(8, 8), Way(4, 8), Way(4, 16), AUTO)


@dataclass(frozen=True)
class Found:
    """One way in one turn.

    Attributes:
        way: its name in tables.
        texts: at once.
        turn: its number.
        tokens_per_s: of all texts together.
        block_efficiency: tokens per round, without the prefill.
        sizes: how often rounds had each gamma and number of nodes.
    """

    way: str
    texts: int
    turn: int
    tokens_per_s: float
    block_efficiency: float
    sizes: dict[str, int]


@dataclass(frozen=True)
class Phase:
    """Texts while the drafter was good or bad.

    Attributes:
        name: one of good, turned bad, bad, turned good, good again.
        texts: at once.
        over_plain: tokens/s relative to texts without drafts, median over turns.
        drafted: share of rounds with a draft.
    """

    name: str
    texts: int
    over_plain: float
    drafted: float


async def measure(
    address: str, way: Way, texts: int, turn: int, count: int, temperature: float = 1.0
) -> Found:
    """A closed loop of `texts` clients.

    Raises:
        RuntimeError: a text failed.
    """
    seeds = range(1000 * (turn + 1), 1000 * (turn + 1) + count)
    loop = asyncio.get_running_loop()
    async with LoadGenerator(address) as generator:
        began = loop.time()
        timelines = await generator.closed_loop(
            [
                asked(seed, _NEW_TOKENS, temperature, gamma=way.gamma, max_nodes=way.nodes)
                for seed in seeds
            ],
            texts,
        )
        wall = loop.time() - began
    found = summaries(timelines)
    sizes = Counter(
        f"{gamma}/{nodes}"
        for summary in found
        for gamma, nodes in zip(summary.gammas[1:], summary.nodes[1:], strict=True)
    )
    tokens = sum(summary.new_tokens for summary in found)
    rounds = sum(summary.rounds - 1 for summary in found)
    return Found(
        str(way), texts, turn, tokens / wall, (tokens - count) / rounds, dict(sizes.most_common(8))
    )


def in_turn(
    address: str, ways: Sequence[Way], options: argparse.Namespace, console: Console
) -> Iterator[Found]:
    """All ways at each number of texts; their order alternates from turn to turn."""
    for texts in options.texts:
        for turn in range(-1, options.turns):  # the first turn warms up, and lets auto adapt
            for way in ways if turn % 2 else ways[::-1]:
                count = options.count * texts
                one = asyncio.run(measure(address, way, texts, turn, count, options.temperature))
                console.print(f"[dim]{texts} texts, {way}: {one.tokens_per_s:.0f} tokens/s[/]")
                if turn >= 0:
                    yield one


def recovered(address: str, flag: Path, options: argparse.Namespace) -> Iterator[Phase]:
    """Adaptive sizes relative to plain decoding in each phase; the drafter is bad while the flag
    exists."""
    for texts in options.texts:
        for name in _PHASES:
            if name == "turned bad":
                flag.touch()
            elif name == "turned good":
                flag.unlink()
            ratios, sizes = [], Counter[str]()
            for turn in range(1 if name.startswith("turned") else options.turns):
                auto, plain = (
                    asyncio.run(measure(address, way, texts, turn, 2 * texts))
                    for way in (AUTO, PLAIN)
                )
                ratios.append(auto.tokens_per_s / plain.tokens_per_s)
                sizes.update(auto.sizes)
            yield Phase(name, texts, median(ratios), 1 - sizes["0/0"] / sizes.total())


def medians(found: Sequence[Found], ways: Sequence[Way]) -> Iterator[dict[str, object]]:
    """A row per way: medians over turns, of speeds and of ratios within a turn."""
    at = {(one.way, one.texts, one.turn): one for one in found}
    turns = sorted({one.turn for one in found})
    for texts in sorted({one.texts for one in found}):
        for way in map(str, ways):
            mine = [at[way, texts, turn] for turn in turns]
            sizes = sum((Counter(one.sizes) for one in mine), Counter[str]())
            speeds = [
                [at[name, texts, turn].tokens_per_s for name in (way, "plain", "auto")]
                for turn in turns
            ]
            yield {
                "texts": texts,
                "way": way,
                "tokens/s": median(own for own, _, _ in speeds),
                "over plain": median(own / other for own, other, _ in speeds),
                "auto over it": median(other / own for own, _, other in speeds),
                "tokens a round": median(one.block_efficiency for one in mine),
                "mostly": ", ".join(f"{size} ({n})" for size, n in sizes.most_common(3)),
            }


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--texts", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--turns", type=int, default=5, help="also of a phase of --recovery")
    parser.add_argument("--count", type=int, default=6, help="texts of one client in a turn")
    parser.add_argument("--temperature", type=float, default=1.0)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--trees", action="store_true", help="the drafter makes trees")
    kind.add_argument("--useless", action="store_true", help="the drafter's tokens are wrong")
    kind.add_argument("--recovery", action="store_true", help="the drafter turns bad and good")
    parser.add_argument("--target", help="a target of your own; needs --drafter")
    parser.add_argument("--drafter", help="its drafter")
    parser.add_argument("--out", type=result_file, help="sizes.json or recovery.json by default")
    options = parser.parse_args()
    console = Console(width=130)
    pair = Pair(options.target, options.drafter, max_length=_MAX_LENGTH)
    found: list[Phase] | list[Found]
    with tempfile.TemporaryDirectory() as scratch:
        flag = Path(scratch) / "shuffled"
        os.environ[SHUFFLED] = str(flag)  # for the drafter, which inherits our environment
        shuffled = {"drafter": "benchmarks.simulated.shuffled"}
        if options.recovery:
            with serving(pair, modules=shuffled) as stack:
                found = list(recovered(stack.addresses["orchestrator"], flag, options))
            console.print(table_of(map(asdict, found)))
        else:
            ways = TREES if options.trees else USELESS if options.useless else CHAINS
            settings = {"drafter": {"METHOD": "tree"}} if options.trees else {}
            if options.useless:
                flag.touch()
            modules = shuffled if options.useless else {}
            with serving(pair, settings, modules=modules) as stack:
                found = list(in_turn(stack.addresses["orchestrator"], ways, options, console))
            console.print(table_of(medians(found, ways), _TITLE))
    name = "recovery.json" if options.recovery else "sizes.json"
    keep(options.out or RESULTS / name, rows=[asdict(one) for one in found])


if __name__ == "__main__":
    main()

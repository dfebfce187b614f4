"""Thousands of short texts, some cancelled or late: are all right, and is everything freed?

    python -m benchmarks.endurance.soak [--texts 20000] [--clients 16] [--cancelled 0.1]
                                        [--late 0.05]

Each text is one of a few whose tokens are known from a run of that text alone. A share of the texts
is cancelled by the client, and another share has a deadline that ends most of them. Exit code 1 if
a text is wrong, or if something is left open.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice

import numpy as np
from rich.console import Console
from rich.progress import Progress

from benchmarks.measure.environment import RESULTS, keep
from benchmarks.measure.services import serving
from benchmarks.measure.tables import table_of
from benchmarks.measure.texts import asked
from benchmarks.measure.vitals import Vitals, vitals_of
from tandem.client.connection import Connection
from tandem.drafter.v1 import drafter_pb2, drafter_pb2_grpc
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.rpc.channel import connect
from tandem.target.v1 import target_pb2, target_pb2_grpc
from tandem.tools.load.generator import LoadGenerator
from tandem.tools.local.pair import Pair
from tandem.tools.local.stack import Stack

_KNOWN = 96
# Texts after which allocators, caches and thread stacks have reached their size.
_WARM_UP = 2000
_BETWEEN = 200
# With fifteen others, a text takes about 0.2 s.
_LATE_SECONDS = (0.001, 0.1)
_IDLE_SECONDS = 10.0


class GivenUp(Exception):
    """A client gives up its text."""


@dataclass
class Seen:
    """What became of the texts.

    Attributes:
        ends: texts by how they ended: whole, cancelled, or a status.
        wrong: seeds of texts that differ from the same text made alone.
        samples: of each service: the number of texts so far, and its vitals.
    """

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[int] = field(default_factory=list)
    samples: dict[str, list[tuple[int, Vitals]]] = field(default_factory=dict)

    def take(self, stack: Stack) -> None:
        """Sample the services."""
        for name, vitals in _vitals(stack).items():
            self.samples.setdefault(name, []).append((self.ends.total(), vitals))


@dataclass(frozen=True)
class Growth:
    """The growth of one service from the end of the warm-up to the end of all texts.

    Attributes:
        service: its name.
        before: vitals at the beginning, when idle.
        after: vitals at the end, when idle.
        bytes_a_text: slope of its memory, by least squares.
        error: standard error of that slope.
        later_bytes_a_text: slope over the second half, when caches are filled.
        later_error: standard error of that slope.
    """

    service: str
    before: Vitals
    after: Vitals
    bytes_a_text: float
    error: float
    later_bytes_a_text: float
    later_error: float


def generation(seed: int) -> pb.Generation:
    """One of the known texts: both rules, three temperatures, chains of each length."""
    rule, temperature = ("block", "token")[seed % 2], (0.0, 0.7, 1.0)[seed % 3]
    return asked(seed, 4 + seed % 29, temperature, gamma=seed % 7, verifier=rule)


class Clients:
    """Clients that request texts, one after the other.

    Args:
        address: of the orchestrator.
        seen: gets the results.
        cancelled: share of texts to cancel.
        late: share of texts with a deadline that most of them miss.
    """

    def __init__(self, address: str, seen: Seen, cancelled: float, late: float) -> None:
        self._address, self._seen = address, seen
        self._cancelled, self._late = cancelled, late
        self._random = random.Random(15)
        with Connection(address) as alone:
            self._known = [
                list(alone.complete(generation(seed), 60).token_ids) for seed in range(_KNOWN)
            ]

    async def run(self, texts: Iterator[int], clients: int, after_each: Callable[[], None]) -> None:
        """Run until there are no texts left."""

        async def work() -> None:
            async with LoadGenerator(self._address, 60) as generator:
                for text in texts:
                    self._seen.ends[await self._one(generator, text % _KNOWN)] += 1
                    after_each()

        await asyncio.gather(*(work() for _ in range(clients)))

    async def _one(self, generator: LoadGenerator, seed: int) -> str:
        """Request a text and check it; returns how it ended."""
        drawn = self._random.random()
        gives_up = drawn < self._cancelled
        is_late = not gives_up and drawn < self._cancelled + self._late
        deadline = self._random.uniform(*_LATE_SECONDS) if is_late else None
        # Give up before the first message, or after one of the first three.
        left = self._random.randrange(4) if gives_up else None
        patience = self._random.uniform(0, 0.02) if left == 0 else None
        got: list[int] = []

        def seen(event: pb.GenerateResponse) -> None:
            nonlocal left
            got.extend(token.id for token in event.round.tokens)
            left = None if left is None else left - 1
            if left == 0:
                raise GivenUp

        try:
            async with asyncio.timeout(patience):
                text = await generator.text(generation(seed), timeout_s=deadline, seen=seen)
            end = text.error.partition(":")[0] or "whole"
        except (GivenUp, TimeoutError):
            end = "cancelled"
        known = self._known[seed]
        if got != (known if end == "whole" else known[: len(got)]):
            self._seen.wrong.append(seed)
        return end


async def left_open(addresses: dict[str, str]) -> int:
    """Sequences and texts still open after the services had time to notice the last ends."""
    async with connect(addresses["drafter"]) as drafter, connect(addresses["target"]) as target:
        drafts = drafter_pb2_grpc.DrafterServiceStub(drafter)
        verdicts = target_pb2_grpc.TargetServiceStub(target)
        with Connection(addresses["orchestrator"]) as texts:
            for _ in range(int(_IDLE_SECONDS / 0.1)):
                draft = await drafts.GetModelInfo(drafter_pb2.GetModelInfoRequest())
                verdict = await verdicts.GetModelInfo(target_pb2.GetModelInfoRequest())
                held = draft.stats.open_sequences + verdict.stats.open_sequences
                held += texts.info().active_requests
                if not held:
                    break
                await asyncio.sleep(0.1)
    return held


def slope_of(samples: list[tuple[int, Vitals]]) -> tuple[float, float]:
    """Growth of memory in bytes per text, by least squares, and its standard error."""
    texts, memory = np.array([(done, vitals.anonymous_bytes) for done, vitals in samples]).T
    away = texts - texts.mean()
    slope = float(away @ memory / (away @ away))
    rest = memory - memory.mean() - slope * away
    return slope, float(np.sqrt(rest @ rest / max(len(texts) - 2, 1) / (away @ away)))


async def soak(stack: Stack, options: argparse.Namespace) -> tuple[Seen, list[Growth], int]:
    """Warm up, run all texts, and check what is left open."""
    seen = Seen()
    clients = Clients(stack.addresses["orchestrator"], seen, options.cancelled, options.late)
    texts = iter(range(options.warm_up + options.texts))
    with Progress() as progress:
        task = progress.add_task("texts", total=options.warm_up + options.texts)

        def after_each() -> None:
            progress.advance(task)
            if seen.ends.total() % _BETWEEN == 0:
                seen.take(stack)

        await clients.run(islice(texts, options.warm_up), options.clients, after_each)
        await left_open(stack.addresses)
        seen.samples.clear()
        before = _vitals(stack)
        await clients.run(texts, options.clients, after_each)
        held = await left_open(stack.addresses)
    after = _vitals(stack)
    growths = [
        Growth(
            name,
            before[name],
            after[name],
            *slope_of(samples),
            *slope_of(samples[len(samples) // 2 :]),
        )
        for name, samples in seen.samples.items()
    ]
    return seen, growths, held


def _vitals(stack: Stack) -> dict[str, Vitals]:
    return {name: vitals_of(process.id) for name, process in stack.processes.items()}


def _row(growth: Growth) -> dict[str, object]:
    pair = (growth.before, growth.after)
    return {
        "service": growth.service,
        "MiB": " to ".join(f"{each.anonymous_bytes / 2**20:.1f}" for each in pair),
        "bytes a text": f"{growth.bytes_a_text:.0f} ± {growth.error:.0f}",
        "in the second half": f"{growth.later_bytes_a_text:.0f} ± {growth.later_error:.0f}",
        "descriptors": " to ".join(str(each.descriptors) for each in pair),
        "threads": " to ".join(str(each.threads) for each in pair),
    }


def main() -> None:
    """Soak, print and write benchmarks/results/soak.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--texts", type=int, default=20_000, help="after the warm-up")
    parser.add_argument("--warm-up", type=int, default=_WARM_UP, help="texts before these")
    parser.add_argument("--clients", type=int, default=16, help="clients at once")
    parser.add_argument("--cancelled", type=float, default=0.1, help="share that is cancelled")
    parser.add_argument("--late", type=float, default=0.05, help="share with a short deadline")
    options = parser.parse_args()
    if options.texts < 6 * _BETWEEN:
        parser.error(f"--texts must be at least {6 * _BETWEEN}, for a slope of the second half")
    with serving(Pair()) as stack:
        seen, growths, held = asyncio.run(soak(stack, options))
    console = Console(width=120)
    ends = ", ".join(f"{count} {end}" for end, count in seen.ends.most_common())
    console.print(
        table_of(map(_row, growths)), f"{ends}; wrong: {len(seen.wrong)}; left open: {held}"
    )
    keep(
        RESULTS / "soak.json",
        options=vars(options),
        ends=seen.ends,
        wrong=seen.wrong,
        left_open=held,
        growth=[asdict(growth) for growth in growths],
        anonymous_bytes={
            name: [(done, vitals.anonymous_bytes) for done, vitals in samples]
            for name, samples in seen.samples.items()
        },
    )
    sys.exit(1 if seen.wrong or held else 0)


if __name__ == "__main__":
    main()

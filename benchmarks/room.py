"""More texts than fit: what it brings to promise the KV cache several times, and what it costs.

    python -m benchmarks.room [--early 16] [--late 4] [--tokens 512] [--turns 3]

Two loads, each with one cache, promised once and several times, in turn. *Early*: all texts may
have 2,048 tokens, and their clients leave after 100. *To the end*: all texts grow to their ends, so
that nothing is gained, and texts are given back on the way. The texts have seeds, and are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

from rich.console import Console

from benchmarks.measure.environment import RESULTS, keep, result_file
from benchmarks.measure.services import serving
from benchmarks.measure.tables import table_of
from benchmarks.measure.texts import asked
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.rpc import channel
from tandem.target.v1 import target_pb2, target_pb2_grpc
from tandem.tools.local.pair import Pair
from tandem.tools.local.stack import Stack

_TEXTS = 64
_PROMISED, _LEAVE_AFTER = 2048, 100
_LOOK_SECONDS = 0.02
# Texts whose promises fit at once; each has a short prompt too.
_FIT, _BESIDE = 8, 64


@dataclass(frozen=True)
class Load:
    """One load on one setting.

    Attributes:
        load: "early" or "to the end".
        times: that the cache is promised.
        at_once: texts that were open at the target, at most.
        mean: the same, in the mean of all looks.
        tokens_per_s: emitted.
        given_back: how often a text was.
    """

    load: str
    times: float
    at_once: int
    mean: float
    tokens_per_s: float
    given_back: int


class Watch:
    """How many texts are open at the target."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.seen: list[int] = []

    async def look(self) -> None:
        """Until it is cancelled."""
        async with channel.connect(self._address) as connection:
            stub: Any = target_pb2_grpc.TargetServiceStub(connection)
            while True:
                reply = await stub.GetModelInfo(target_pb2.GetModelInfoRequest())
                self.seen.append(reply.stats.open_sequences)
                await asyncio.sleep(_LOOK_SECONDS)


async def texts(stack: Stack, tokens: int, leave_after: int) -> tuple[list[list[int]], int]:
    """All texts at once: what they say, and how often one was given back. Clients leave when they
    have `leave_after` tokens."""

    async def one(stub: Any, seed: int) -> tuple[list[int], int]:
        said: list[int] = []
        generation = asked(seed, tokens, gamma=4)
        call = stub.Generate(pb.GenerateRequest(generation=generation))
        async for event in call:
            said += [token.id for token in event.round.tokens]
            if event.HasField("summary"):
                return said, event.summary.given_back
            if len(said) >= leave_after:
                call.cancel()
                break
        return said[:leave_after], 0

    async with channel.connect(stack.addresses["orchestrator"]) as connection:
        stub: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(connection)
        ended = await asyncio.gather(*(one(stub, seed) for seed in range(_TEXTS)))
    return [said for said, _ in ended], sum(given_back for _, given_back in ended)


async def measure(stack: Stack, load: str, times: float, options: argparse.Namespace) -> Any:
    """One load: its figures, and what its texts say."""
    early = load == "early"
    tokens, leave_after = (_PROMISED, _LEAVE_AFTER) if early else (options.tokens, options.tokens)
    watch = Watch(stack.addresses["target"])
    looking = asyncio.create_task(watch.look())
    started = time.perf_counter()
    try:
        said, given_back = await texts(stack, tokens, leave_after + (not early))
    finally:
        looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking
    seconds = time.perf_counter() - started
    emitted = sum(map(len, said))
    seen = watch.seen or [0]
    figures = Load(load, times, max(seen), mean(seen), emitted / seconds, given_back)
    return figures, said


def main() -> None:
    """Measure, print a table, write benchmarks/results/room.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--early", type=float, default=16, help="times, where texts end early")
    parser.add_argument("--late", type=float, default=4, help="times, where all grow to their ends")
    parser.add_argument("--tokens", type=int, default=512, help="of texts that grow to their ends")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--engine", default="auto", help="the services' ENGINE")
    parser.add_argument("--out", type=result_file, default=RESULTS / "room.json")
    options = parser.parse_args()
    loads = {"early": (options.early, _PROMISED), "to the end": (options.late, options.tokens)}
    found: list[Load] = []
    console, differing = Console(width=120), dict.fromkeys(loads, 0)
    for load, (times, tokens) in loads.items():
        held = _FIT * (tokens + _BESIDE)
        first: list[list[int]] | None = None
        for _ in range(options.turns):
            for each in (1.0, times):
                own = {"MAX_SEQUENCES": f"{_TEXTS}", "ENGINE": options.engine}
                scoring = own | {"CACHE_TOKENS": f"{held}", "OVERCOMMIT": f"{each}"}
                front = {"QUEUE_SECONDS": "3600", "MAX_WAITING": f"{_TEXTS}"}
                more = {"target": scoring, "drafter": own, "orchestrator": front}
                with serving(Pair(max_length=tokens + _BESIDE), more) as stack:
                    figures, said = asyncio.run(measure(stack, load, each, options))
                found.append(figures)
                console.print(f"[dim]{figures}[/]")
                first = first or said
                differing[load] += sum(a != b for a, b in zip(first, said, strict=True))
    rows = [
        _together([one for one in found if (one.load, one.times) == key])
        for key in dict.fromkeys((one.load, one.times) for one in found)
    ]
    console.print(table_of(map(asdict, rows), f"{_TEXTS} texts, room for {_FIT}"))
    console.print(f"texts that differ from those of the first run: {differing}")
    keep(options.out, rows=[asdict(one) for one in found], differing=differing)


def _together(loads: Sequence[Load]) -> Load:
    """Medians of several turns."""
    first = loads[0]
    return Load(
        first.load,
        first.times,
        int(median(one.at_once for one in loads)),
        median(one.mean for one in loads),
        median(one.tokens_per_s for one in loads),
        int(median(one.given_back for one in loads)),
    )


if __name__ == "__main__":
    main()

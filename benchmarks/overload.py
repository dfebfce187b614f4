"""More clients than there are places: what the texts that are made lose by it, and the others wait.

    python -m benchmarks.overload [--places 8] [--times 4] [--seconds 60] [--simulated]

Three phases of a closed loop: as many clients as places, several times as many, as many again. A
refused client comes again when it was told to, on the connection that it has. Models on this
machine's cores leave few of them to the orchestrator and the clients; with --simulated they are on
devices that only take time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.measure.environment import RESULTS, describe
from benchmarks.measure.prompts import PROMPTS
from benchmarks.overhead import save_pair
from benchmarks.simulated.fleet import Device, fleet
from tandem.common.v1 import common_pb2
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.rpc.channel import connect
from tandem.tools.local.pair import Pair
from tandem.tools.local.stack import Stack, StackSettings, running

_NEW_TOKENS = 96
_PUSHBACK = "grpc-retry-pushback-ms"
# Of a phase: full speed is due five seconds behind the end of an overload.
_EARLY = (5.0, 10.0)
_DEVICES = {"target": Device(20.0, 0.05), "drafter": Device(2.0, 0.02)}


@dataclass
class Counts:
    """What clients met in a phase.

    Attributes:
        tokens: of texts that were made.
        texts: as many.
        lost_drafters: of them.
        ended_s: when each ended, by time.monotonic(), and its tokens.
        text_s: from the accepted call to the end, each.
        refusal_ms: until a refusal was there, each.
        others: statuses that are neither.
    """

    tokens: int = 0
    texts: int = 0
    lost_drafters: int = 0
    ended_s: list[tuple[float, int]] = field(default_factory=list)
    text_s: list[float] = field(default_factory=list)
    refusal_ms: list[float] = field(default_factory=list)
    others: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Phase:
    """A phase's figures.

    Attributes:
        name: of it.
        clients: at once.
        goodput: tokens a second of texts that were made.
        texts: as many.
        early: tokens a second of those that ended in the fifth to the tenth second.
        text_p50_s: of a text.
        refusals: as many.
        refusal_p50_ms: until a client knew.
        refusal_p99_ms: the same of the slowest in a hundred.
        lost_drafters: texts that lost theirs.
        others: statuses that are neither success nor refusal.
        memory_mib: of the orchestrator at the end.
    """

    name: str
    clients: int
    goodput: float
    early: float
    texts: int
    text_p50_s: float
    refusals: int
    refusal_p50_ms: float
    refusal_p99_ms: float
    lost_drafters: int
    others: dict[str, int]
    memory_mib: float


def _generation(seed: int, in_words: bool) -> pb.Generation:
    """A text of a seed; a model on a simulated device has no tokenizer."""
    message = pb.Generation(
        stopping=pb.Stopping(max_new_tokens=_NEW_TOKENS, ignore_eos=True),
        sampling=common_pb2.Sampling(temperature=1.0, seed=seed),
    )
    if in_words:
        message.prompt = PROMPTS[seed % len(PROMPTS)]
    else:
        message.prompt_token_ids.extend(1 + (seed * 7 + place) % 2000 for place in range(24))
    return message


async def _client(
    channel: grpc.aio.Channel, in_words: bool, number: int, until: float, counts: Counts
) -> None:
    seed = 1000 * number
    stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
    while (began := time.monotonic()) < until:
        seed += 1
        message = _generation(seed, in_words)
        try:
            summary = (
                await stub.Complete(pb.CompleteRequest(generation=message), timeout=120)
            ).summary
        except grpc.aio.AioRpcError as error:
            code = error.code().name
            if code != "RESOURCE_EXHAUSTED":
                counts.others[code] = counts.others.get(code, 0) + 1
                await asyncio.sleep(1)
                continue
            counts.refusal_ms.append(1e3 * (time.monotonic() - began))
            told = dict(error.trailing_metadata() or ())[_PUSHBACK]
            await asyncio.sleep(int(told) / 1e3)
            continue
        counts.texts += 1
        counts.tokens += summary.new_tokens
        counts.ended_s.append((time.monotonic(), summary.new_tokens))
        counts.lost_drafters += summary.drafter_lost
        counts.text_s.append(time.monotonic() - began)


async def _phase(name: str, stack: Stack, in_words: bool, clients: int, seconds: float) -> Phase:
    address, process = stack.addresses["orchestrator"], stack.processes["orchestrator"].id
    counts = Counts()
    async with AsyncExitStack() as connected:
        channels = [await connected.enter_async_context(connect(address)) for _ in range(clients)]
        # Clients come and stay: how long connections take to be made is not what is asked here.
        await asyncio.gather(*(channel.channel_ready() for channel in channels))
        began = time.monotonic()
        await asyncio.gather(
            *(
                _client(channel, in_words, number, began + seconds, counts)
                for number, channel in enumerate(channels)
            )
        )
        took = time.monotonic() - began
    refused = np.array(counts.refusal_ms or [0.0])
    return Phase(
        name,
        clients,
        counts.tokens / took,
        sum(n for end, n in counts.ended_s if _EARLY[0] <= end - began < _EARLY[1])
        / (_EARLY[1] - _EARLY[0]),
        counts.texts,
        float(np.median(counts.text_s or [0.0])),
        len(counts.refusal_ms),
        float(np.median(refused)),
        float(np.quantile(refused, 0.99)),
        counts.lost_drafters,
        counts.others,
        _memory_mib(process),
    )


def _memory_mib(process: int) -> float:
    """Resident, of a process."""
    with open(f"/proc/{process}/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20


def _table(phases: list[Phase]) -> Table:
    table = Table(
        "phase", "clients", "tokens/s", "from 5 to 10 s", "texts", "s a text", "refusals",
        "ms p50", "ms p99", "drafters lost", "others", "MiB",
    )  # fmt: skip
    for phase in phases:
        table.add_row(
            phase.name,
            str(phase.clients),
            f"{phase.goodput:.0f}",
            f"{phase.early:.0f}",
            str(phase.texts),
            f"{phase.text_p50_s:.2f}",
            str(phase.refusals),
            f"{phase.refusal_p50_ms:.1f}",
            f"{phase.refusal_p99_ms:.1f}",
            str(phase.lost_drafters),
            ", ".join(f"{count} {code}" for code, count in phase.others.items()) or "-",
            f"{phase.memory_mib:.0f}",
        )
    return table


@contextmanager
def _serving(options: argparse.Namespace) -> Iterator[Stack]:
    """The services, with few places."""
    places = {"MAX_SEQUENCES": str(options.places)}
    waiting = {"MAX_WAITING": str(options.waiting)}
    if options.simulated:
        settings = {"orchestrator": waiting, "target": places, "drafter": places}
        replicas = {"target": 1, "drafter": 1}
        with TemporaryDirectory() as scratch:
            models = save_pair(Path(scratch))
            with fleet(models, _DEVICES, replicas, settings=settings) as stack:
                yield stack
        return
    pair = {name: settings | places for name, settings in Pair().settings().items()}
    services = {"orchestrator": {"LISTEN": "127.0.0.1:0", **waiting}, **pair}
    with running(StackSettings(services)) as stack:
        stack.settle()
        yield stack


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--places", type=int, default=8, help="of the target and the drafter")
    parser.add_argument("--times", type=int, default=4, help="as many clients as places")
    parser.add_argument("--seconds", type=float, default=60.0, help="of a phase")
    parser.add_argument(
        "--overload-seconds", type=float, help="of the overload; else as the others"
    )
    parser.add_argument("--waiting", type=int, default=8, help="texts that may wait")
    parser.add_argument("--simulated", action="store_true", help="models on simulated devices")
    options = parser.parse_args()
    phases: list[Phase] = []
    console = Console(width=140)
    with _serving(options) as stack:
        many = options.times * options.places
        for name, clients in (
            ("warm-up", options.places),
            ("full", options.places),
            ("overload", many),
            ("full again", options.places),
        ):
            seconds = {
                "warm-up": options.seconds / 4,
                "overload": options.overload_seconds or options.seconds,
            }.get(name, options.seconds)
            console.print(f"[dim]{name}: {clients} clients, {seconds:g} s[/]")
            phases.append(asyncio.run(_phase(name, stack, not options.simulated, clients, seconds)))
    console.print(_table(phases))
    out = RESULTS / ("overload-simulated.json" if options.simulated else "overload.json")
    rows = [asdict(phase) for phase in phases]
    out.write_text(json.dumps({**describe(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()

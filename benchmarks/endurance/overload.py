"""More clients than slots: how much running texts lose, and how long other clients wait.

    python -m benchmarks.endurance.overload [--places 8] [--times 4] [--seconds 60] [--simulated]

Three phases of a closed loop: as many clients as slots, several times as many, as many as slots
again. A refused client retries when it was told to, on the same connection. Models on this
machine's cores leave few cores to the orchestrator and the clients; with --simulated, passes run
on simulated devices that only take time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from rich.console import Console

from benchmarks.measure.environment import RESULTS, keep
from benchmarks.measure.services import serving
from benchmarks.measure.tables import table_of
from benchmarks.measure.texts import asked, token_ids
from benchmarks.measure.vitals import vitals_of
from benchmarks.overhead import save_pair
from benchmarks.simulated.device import variables
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.tools.load.generator import LoadGenerator
from tandem.tools.load.timeline import Timeline
from tandem.tools.local.pair import Pair
from tandem.tools.local.stack import Stack

_NEW_TOKENS = 96
_MAX_LENGTH = 512
_TEXT_SECONDS = 120.0
_REFUSED = "RESOURCE_EXHAUSTED"
# Seconds of a phase for `early`: full speed is expected five seconds after the end of an overload.
_EARLY = (5.0, 10.0)
# Milliseconds of a pass, and in addition of each of its rows.
_DEVICES = {"target": (20.0, 0.05), "drafter": (2.0, 0.02)}


@dataclass(frozen=True)
class Phase:
    """A phase's figures.

    Attributes:
        name: of the phase.
        clients: at once.
        goodput: tokens a second of complete texts.
        early: tokens a second of texts that ended in the fifth to the tenth second.
        texts: number of complete texts.
        text_p50_s: time of a text.
        refusals: number of refused calls.
        refusal_p50_ms: time until a client learnt of its refusal.
        refusal_p99_ms: time until a client learnt of its refusal.
        lost_drafters: texts that lost their drafter.
        others: statuses that are neither success nor refusal.
        memory_mib: of the orchestrator, at the end.
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


def _generation(seed: int, in_words: bool, new_tokens: int = _NEW_TOKENS) -> pb.Generation:
    """A request by its seed; a model on a simulated device has no tokenizer."""
    return asked(seed, new_tokens, prompt=None if in_words else token_ids(seed, 24))


async def _texts(
    address: str, in_words: bool, clients: int, seconds: float
) -> tuple[float, list[Timeline]]:
    """When the clients begin, and what they met until they are whole."""
    met: list[Timeline] = []
    connected = asyncio.Barrier(clients)

    async def client(number: int) -> float:
        async with LoadGenerator(address, _TEXT_SECONDS) as generator:
            # All clients connect first: the time to connect is not measured here.
            await generator.text(_generation(number, in_words, 1))
            await connected.wait()
            began, seed = time.perf_counter(), 1000 * number
            while time.perf_counter() < began + seconds:
                seed += 1
                text = await generator.text(_generation(seed, in_words))
                met.append(text)
                if text.error:
                    await asyncio.sleep(1.0 if text.retry_s is None else text.retry_s)
        return began

    return min(await asyncio.gather(*map(client, range(clients)))), met


def _phase(name: str, stack: Stack, in_words: bool, clients: int, seconds: float) -> Phase:
    address = stack.addresses["orchestrator"]
    began, met = asyncio.run(_texts(address, in_words, clients, seconds))
    took = max(text.ended_s for text in met) - began
    statuses = Counter(text.error.partition(":")[0] for text in met if text.error)
    whole = [text for text in met if not text.error]
    early = [text for text in whole if _EARLY[0] <= text.ended_s - began < _EARLY[1]]
    waits = [text.ended_s - text.asked_s for text in met if text.error.startswith(_REFUSED)]
    refusal_p50, refusal_p99 = np.quantile(waits or [0.0], (0.5, 0.99)) * 1e3
    return Phase(
        name,
        clients,
        sum(text.tokens for text in whole) / took,
        sum(text.tokens for text in early) / (_EARLY[1] - _EARLY[0]),
        len(whole),
        float(np.median([text.ended_s - text.asked_s for text in whole] or [0.0])),
        statuses.pop(_REFUSED, 0),
        float(refusal_p50),
        float(refusal_p99),
        sum(text.summary.drafter_lost for text in whole if text.summary),
        dict(statuses),
        vitals_of(stack.processes["orchestrator"].id).resident_bytes / 2**20,
    )


@contextmanager
def _serving(options: argparse.Namespace) -> Iterator[Stack]:
    """The services, with few slots."""
    waiting, places = {"MAX_WAITING": str(options.waiting)}, {"MAX_SEQUENCES": str(options.places)}
    if options.simulated:
        # With "auto", another engine could take over in the middle of a run.
        places |= {"THREADS": "1", "ENGINE": "torch"}
    settings = {"orchestrator": waiting, "target": places, "drafter": places}
    pair, modules = Pair(), dict[str, str]()
    with TemporaryDirectory() as scratch:
        if options.simulated:
            models = save_pair(Path(scratch))
            pair = Pair(str(models["target"]), str(models["drafter"]), max_length=_MAX_LENGTH)
            modules = {service: f"benchmarks.simulated.{service}" for service in _DEVICES}
            for service, times in _DEVICES.items():
                os.environ |= variables(service, *times)  # the services inherit our environment
        with serving(pair, settings, modules=modules) as stack:
            yield stack


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--places", type=int, default=8, help="slots of target and drafter")
    parser.add_argument("--times", type=int, default=4, help="clients per slot in the overload")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of a phase")
    parser.add_argument(
        "--overload-seconds", type=float, help="length of the overload; default: --seconds"
    )
    parser.add_argument("--waiting", type=int, default=8, help="texts that may wait")
    parser.add_argument("--simulated", action="store_true", help="models on simulated devices")
    options = parser.parse_args()
    phases: list[Phase] = []
    console = Console(width=160)
    with _serving(options) as stack:
        for name, times, seconds in (
            ("warm-up", 1, options.seconds / 4),
            ("full", 1, options.seconds),
            ("overload", options.times, options.overload_seconds or options.seconds),
            ("full again", 1, options.seconds),
        ):
            clients = times * options.places
            console.print(f"[dim]{name}: {clients} clients, {seconds:g} s[/]")
            phases.append(_phase(name, stack, not options.simulated, clients, seconds))
    console.print(table_of(map(asdict, phases)))
    name = "overload-simulated.json" if options.simulated else "overload.json"
    keep(RESULTS / name, options=vars(options), rows=[asdict(phase) for phase in phases])


if __name__ == "__main__":
    main()

"""The cost of a hostile caller: honest texts, while another caller floods their target.

    python -m benchmarks.endurance.hostile [--clients 8] [--texts 4]

Honest clients call the orchestrator; the hostile one calls the target directly. The target's CPU
time and its passes are counted per round of the honest texts, so the result does not depend on how
busy the machine is.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from rich.console import Console

from benchmarks.measure.services import serving
from benchmarks.measure.tables import table_of
from benchmarks.measure.texts import asked, summaries
from benchmarks.measure.vitals import cpu_seconds
from tandem.rpc.channel import connect
from tandem.rpc.streams.server import MAX_REQUESTS
from tandem.target.v1 import target_pb2, target_pb2_grpc
from tandem.tools.load.generator import LoadGenerator
from tandem.tools.local.pair import Pair
from tandem.tools.local.stack import Stack

_NEW_TOKENS, _GAMMA = 200, 4


@dataclass
class Flooder:
    """A stream that sends the most sequences per message that are allowed, whatever is answered.

    Attributes:
        step: the step that each sequence begins with.
        sent: messages so far.
    """

    step: dict[str, Any]
    sent: int = 0

    async def run(self, stub: Any) -> None:
        """Send as fast as messages are accepted, until cancelled."""
        call = stub.Verify()
        reading = asyncio.create_task(self._read(call))
        try:
            while True:
                first = self.sent * MAX_REQUESTS + 1
                numbers = range(first, first + MAX_REQUESTS)
                requests = [target_pb2.SequenceRequest(sequence=n, **self.step) for n in numbers]
                await call.write(target_pb2.VerifyRequest(requests=requests))
                self.sent += 1
        finally:
            reading.cancel()

    async def _read(self, call: Any) -> None:
        while await call.read() is not grpc.aio.EOF:
            pass


_HONEST = "an honest one"
# What runs next to the honest clients; for a flood, the step that begins each of its sequences.
BESIDE: dict[str, dict[str, Any] | None] = {
    "nobody": None,
    _HONEST: None,
    "a flood of steps without an opening": {"verify": target_pb2.VerifyStep(round=1, position=1)},
    "a flood of bad openings": {"open": target_pb2.OpenSequence()},
}


async def measure(stack: Stack, beside: str, clients: int, texts: int) -> list[float]:
    """For honest rounds: CPU ms and passes per round, rounds/s, ms p50 and p99; then the number of
    messages that the flood has sent.

    Raises:
        RuntimeError: an honest text failed.
    """
    step = BESIDE[beside]
    other = None if step is None else Flooder(step)
    clients += beside == _HONEST
    process = stack.processes["target"].id
    async with (
        connect(stack.addresses["target"]) as channel,
        LoadGenerator(stack.addresses["orchestrator"]) as generator,
    ):
        stub: Any = target_pb2_grpc.TargetServiceStub(channel)

        async def state() -> np.ndarray:
            info = await stub.GetModelInfo(target_pb2.GetModelInfoRequest())
            return np.array([cpu_seconds(process), info.stats.forward_passes, time.monotonic()])

        async def load(count: int) -> list[Any]:
            generations = [asked(seed, _NEW_TOKENS, gamma=_GAMMA) for seed in range(count)]
            return await generator.closed_loop(generations, clients)

        attack: Coroutine[Any, Any, None] = asyncio.sleep(0) if other is None else other.run(stub)
        attacking = asyncio.create_task(attack)
        await load(clients)
        before = await state()
        timelines = await load(texts * clients)
        cpu, passes, seconds = await state() - before
        if attacking.done():
            attacking.result()  # why it stopped
        attacking.cancel()
    sent = 0 if other is None else other.sent
    rounds = sum(summary.rounds for summary in summaries(timelines))
    took = np.concatenate([timeline.rounds_s for timeline in timelines])
    p50, p99 = 1000 * np.quantile(took, (0.5, 0.99))
    return [1000 * cpu / rounds, passes / rounds, rounds / seconds, p50, p99, sent]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--clients", type=int, default=8, help="honest clients")
    parser.add_argument("--texts", type=int, default=4, help="texts of each in a measurement")
    parser.add_argument("--beside", nargs="+", default=list(BESIDE), choices=list(BESIDE))
    options = parser.parse_args()
    heads = ("CPU, ms a round", "passes a round", "rounds/s", "ms p50", "p99", "it sent")
    rows = []
    with serving(Pair(), {"target": {"ENGINE": "torch"}}) as stack:
        for name in options.beside:
            found = asyncio.run(measure(stack, name, options.clients, options.texts))
            rows.append({"beside them": name, **dict(zip(heads, found, strict=True))})
    Console(width=120).print(table_of(rows))


if __name__ == "__main__":
    main()

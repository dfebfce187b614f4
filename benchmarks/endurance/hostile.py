"""What a hostile caller costs: honest texts, beside bad drafts and floods at their target.

    python -m benchmarks.endurance.hostile [--clients 8] [--texts 4]

The honest ones are clients of the orchestrator; the hostile one calls the target itself. What is
counted is the target's CPU time and its passes for each round of the honest texts, so that it does
not matter how busy the machine is.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.measure.services import serving
from benchmarks.measure.texts import asked, summaries
from benchmarks.measure.vitals import cpu_seconds
from tandem.common.v1 import common_pb2
from tandem.rpc.channel import connect
from tandem.rpc.streams.server import MAX_REQUESTS
from tandem.target.v1 import target_pb2, target_pb2_grpc
from tandem.tools.load.generator import LoadGenerator
from tandem.tools.local.pair import Pair
from tandem.tools.local.stack import Stack

_NEW_TOKENS = 200
_PROMPT, _GAMMA, _SUPPORT = 16, 4, 256


def _draft() -> common_pb2.Draft:
    """Four tokens with rows of 256, to be spoilt."""
    ids = np.tile(np.arange(_SUPPORT, dtype="<u4"), _GAMMA)
    weights = np.tile(np.arange(_SUPPORT, 0, -1, dtype="<u2"), _GAMMA)
    rows = common_pb2.Rows(sizes=[_SUPPORT] * _GAMMA, ids=ids.tobytes(), weights=weights.tobytes())
    return common_pb2.Draft(token_ids=[1, 2, 3, 4], rows=rows)


def _bad_rows() -> common_pb2.Draft:
    """A weight of 0 in the last place, which is found beside the batch's verdicts."""
    draft = _draft()
    draft.rows.weights = draft.rows.weights[:-2] + b"\0\0"
    return draft


def _bad_sizes() -> common_pb2.Draft:
    """Refused as it is read."""
    draft = _draft()
    draft.rows.sizes[-1] += 1
    return draft


def _opening() -> target_pb2.OpenSequence:
    return target_pb2.OpenSequence(
        token_ids=range(1, _PROMPT + 1),
        sampling=common_pb2.Sampling(seed=1),
        verifier="block",
        max_new_tokens=_NEW_TOKENS,
    )


@dataclass
class Liar:
    """A stream with one sequence after the other, each of which its first draft ends.

    Attributes:
        draft: that is sent.
        sent: drafts so far.
    """

    draft: common_pb2.Draft
    sent: int = 0

    async def run(self, stub: Any) -> None:
        """As fast as it is answered, until cancelled."""
        call = stub.Verify()
        while True:
            self.sent += 1
            opened = await self._ask(call, open=_opening())
            assert opened.HasField("opened")
            step = target_pb2.VerifyStep(round=1, position=_PROMPT + 1, draft=self.draft)
            answer = await self._ask(call, verify=step)
            assert not answer.verdict.position, "the draft was taken"

    async def _ask(self, call: Any, **step: Any) -> Any:
        request = target_pb2.SequenceRequest(sequence=self.sent, **step)
        await call.write(target_pb2.VerifyRequest(requests=[request]))
        (answer,) = (await call.read()).responses
        return answer


@dataclass
class Flooder:
    """A stream with as many sequences in a message as there may be, whatever is answered.

    Attributes:
        step: that each of them begins with.
        sent: messages so far.
    """

    step: dict[str, Any]
    sent: int = 0

    async def run(self, stub: Any) -> None:
        """As fast as it is taken, until cancelled."""
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
# Who is beside the honest ones.
BESIDE: dict[str, Callable[[], Liar | Flooder] | None] = {
    "nobody": None,
    _HONEST: None,
    "sizes that do not add up": lambda: Liar(_bad_sizes()),
    "a weight of 0": lambda: Liar(_bad_rows()),
    "a flood of steps without an opening": lambda: Flooder(
        {"verify": target_pb2.VerifyStep(round=1, position=1)}
    ),
    "a flood of bad openings": lambda: Flooder({"open": target_pb2.OpenSequence()}),
}


async def measure(stack: Stack, beside: str, clients: int, texts: int) -> list[float]:
    """Of honest rounds: CPU ms and passes of each, rounds/s, ms p50 and p99; and what was sent.

    Raises:
        RuntimeError: an honest text failed.
    """
    hostile = BESIDE[beside]
    other = None if hostile is None else hostile()
    clients += beside == _HONEST
    process = stack.processes["target"].id
    async with (
        connect(stack.addresses["target"]) as channel,
        LoadGenerator(stack.addresses["orchestrator"]) as generator,
    ):
        stub: Any = target_pb2_grpc.TargetServiceStub(channel)

        async def state() -> np.ndarray:
            info = await stub.GetModelInfo(target_pb2.GetModelInfoRequest())
            sent = 0 if other is None else other.sent
            passes = info.stats.forward_passes
            return np.array([cpu_seconds(process), passes, time.monotonic(), sent])

        async def load(count: int) -> list[Any]:
            generations = [asked(seed, _NEW_TOKENS, gamma=_GAMMA) for seed in range(count)]
            return await generator.closed_loop(generations, clients)

        attack: Coroutine[Any, Any, None] = asyncio.sleep(0) if other is None else other.run(stub)
        attacking = asyncio.create_task(attack)
        await load(clients)
        before = await state()
        timelines = await load(texts * clients)
        cpu, passes, seconds, sent = await state() - before
        if attacking.done():
            attacking.result()  # why it stopped
        attacking.cancel()
    rounds = sum(summary.rounds for summary in summaries(timelines))
    took = np.concatenate([timeline.rounds_s for timeline in timelines])
    p50, p99 = 1000 * np.quantile(took, (0.5, 0.99))
    return [1000 * cpu / rounds, passes / rounds, rounds / seconds, p50, p99, sent]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--clients", type=int, default=8, help="honest ones")
    parser.add_argument("--texts", type=int, default=4, help="of each of them in a measurement")
    parser.add_argument("--beside", nargs="+", default=list(BESIDE), choices=list(BESIDE))
    options = parser.parse_args()
    columns = ("CPU, ms a round", "passes a round", "rounds/s", "ms p50", "p99", "it sent")
    table = Table("beside them", *columns)
    with serving(Pair(), {"target": {"ENGINE": "torch"}}) as stack:
        for name in options.beside:
            found = asyncio.run(measure(stack, name, options.clients, options.texts))
            table.add_row(name, *(f"{value:.2f}" for value in found))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()

"""What a hostile caller costs: honest sequences of a target, beside bad drafts and floods.

    python -m benchmarks.hostile [--sequences 8] [--rounds 300]

The target is a process of its own, with the embedded model. What is counted is its CPU time and
its passes for each round of the honest ones, so that it does not matter how busy the machine is.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from rich.console import Console
from rich.table import Table

from tandem.common.v1 import common_pb2
from tandem.rpc.channel import connect
from tandem.rpc.streams.server import MAX_REQUESTS
from tandem.target.v1 import target_pb2, target_pb2_grpc
from tandem.tools.local.stack import StackSettings, running

_PROMPT, _NEW, _GAMMA, _SUPPORT = 16, 400, 4, 256
_TICKS = os.sysconf("SC_CLK_TCK")


def _draft(**changes: Any) -> common_pb2.Draft:
    """Four tokens with rows of 256."""
    ids = np.tile(np.arange(_SUPPORT, dtype="<u4"), _GAMMA)
    weights = np.tile(np.arange(_SUPPORT, 0, -1, dtype="<u2"), _GAMMA)
    fields = {"ids": ids, "weights": weights} | changes
    rows = common_pb2.Rows(
        sizes=[_SUPPORT] * _GAMMA, ids=fields["ids"].tobytes(), weights=fields["weights"].tobytes()
    )
    return common_pb2.Draft(token_ids=[1, 2, 3, 4], rows=rows)


def _bad_rows() -> common_pb2.Draft:
    """A weight of 0 in the last place, which is found beside the batch's verdicts."""
    weights = np.tile(np.arange(_SUPPORT, 0, -1, dtype="<u2"), _GAMMA)
    weights[-1] = 0
    return _draft(weights=weights)


def _bad_sizes() -> common_pb2.Draft:
    """Refused as it is read."""
    draft = _draft()
    draft.rows.sizes[-1] += 1
    return draft


@dataclass
class Caller:
    """A stream with one sequence after the other; what it sends may end each at once.

    Attributes:
        stub: of the target.
        draft: that each round has.
        rounds: answered so far.
        took_s: each of them.
    """

    stub: Any
    draft: common_pb2.Draft
    rounds: int = 0
    took_s: list[float] = field(default_factory=list)

    async def run(self) -> None:
        call = self.stub.Verify()
        number = position = round_ = 0
        while True:
            if not position:
                number, round_ = number + 1, 0
                opened = await self._ask(call, number, open=_opening())
                assert opened.HasField("opened")
                position = _PROMPT + 1
            round_ += 1
            step = target_pb2.VerifyStep(round=round_, position=position, draft=self.draft)
            began = time.monotonic()
            answer = await self._ask(call, number, verify=step)
            self.took_s.append(time.monotonic() - began)
            self.rounds += 1
            position = answer.verdict.position
            if position and position > _PROMPT + _NEW - _GAMMA - 1:
                await self._ask(call, number, close=target_pb2.CloseSequence())
                position = 0

    async def _ask(self, call: Any, number: int, **step: Any) -> Any:
        request = target_pb2.SequenceRequest(sequence=number, **step)
        await call.write(target_pb2.VerifyRequest(requests=[request]))
        (answer,) = (await call.read()).responses
        return answer


@dataclass
class Flooder:
    """A stream with as many sequences in a message as there may be, whatever is answered.

    Attributes:
        stub: of the target.
        step: that each of them begins with.
        rounds: messages sent so far.
    """

    stub: Any
    step: dict[str, Any]
    rounds: int = 0

    async def run(self) -> None:
        call = self.stub.Verify()
        reading = asyncio.create_task(self._read(call))
        try:
            while True:
                first = self.rounds * MAX_REQUESTS + 1
                numbers = range(first, first + MAX_REQUESTS)
                requests = [target_pb2.SequenceRequest(sequence=n, **self.step) for n in numbers]
                await call.write(target_pb2.VerifyRequest(requests=requests))
                self.rounds += 1
        finally:
            reading.cancel()

    async def _read(self, call: Any) -> None:
        while await call.read() is not grpc.aio.EOF:
            pass


def _opening() -> target_pb2.OpenSequence:
    return target_pb2.OpenSequence(
        token_ids=range(1, _PROMPT + 1),
        sampling=common_pb2.Sampling(seed=1),
        verifier="block",
        max_new_tokens=_NEW,
    )


# Who is beside the honest ones.
BESIDE: dict[str, Callable[[Any], Caller | Flooder] | None] = {
    "nobody": None,
    "an honest one": lambda stub: Caller(stub, _draft()),
    "sizes that do not add up": lambda stub: Caller(stub, _bad_sizes()),
    "a weight of 0": lambda stub: Caller(stub, _bad_rows()),
    "a flood of steps without an opening": lambda stub: Flooder(
        stub, {"verify": target_pb2.VerifyStep(round=1, position=1)}
    ),
    "a flood of bad openings": lambda stub: Flooder(stub, {"open": target_pb2.OpenSequence()}),
}


def _cpu_seconds(process: int) -> float:
    with open(f"/proc/{process}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


async def _measure(
    address: str,
    process: int,
    beside: Callable[[Any], Caller | Flooder] | None,
    sequences: int,
    rounds: int,
) -> list[float]:
    """Of honest rounds: CPU ms and passes of each, rounds/s, ms p50 and p99; and the rounds, or
    messages, of the other one."""
    async with connect(address) as channel:
        stub: Any = target_pb2_grpc.TargetServiceStub(channel)
        honest = [Caller(stub, _draft()) for _ in range(sequences)]
        other = [] if beside is None else [beside(stub)]
        tasks = [asyncio.create_task(caller.run()) for caller in (*honest, *other)]
        try:
            await _passed(honest, tasks, sequences * 10)
            for caller in honest:
                caller.took_s.clear()
            before = await _state(stub, honest, other, process)
            await _passed(honest, tasks, sum(caller.rounds for caller in honest) + rounds)
            after = await _state(stub, honest, other, process)
        finally:
            for task in tasks:
                task.cancel()
    cpu, passes, seconds, own, others = (b - a for a, b in zip(before, after, strict=True))
    took = np.concatenate([caller.took_s for caller in honest])
    return [
        1000 * cpu / own,
        passes / own,
        own / seconds,
        *(1000 * np.quantile(took, (0.5, 0.99))),
        others / own * sequences,
    ]


async def _passed(honest: list[Caller], tasks: list[asyncio.Task[None]], rounds: int) -> None:
    while sum(caller.rounds for caller in honest) < rounds:
        for task in tasks:
            if task.done():
                task.result()
        await asyncio.sleep(0.005)


async def _state(
    stub: Any, honest: list[Caller], other: list[Caller | Flooder], process: int
) -> tuple[float, ...]:
    info = await stub.GetModelInfo(target_pb2.GetModelInfoRequest())
    counts = [sum(caller.rounds for caller in callers) for callers in (honest, other)]
    return (_cpu_seconds(process), info.stats.forward_passes, time.monotonic(), *counts)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--sequences", type=int, default=8, help="honest ones")
    parser.add_argument("--rounds", type=int, default=300, help="of theirs, in each measurement")
    parser.add_argument("--beside", nargs="+", default=list(BESIDE), choices=list(BESIDE))
    options = parser.parse_args()
    table = Table(
        "beside them",
        "CPU, ms a round",
        "passes a round",
        "rounds/s",
        "ms p50",
        "p99",
        "its rounds",
    )
    here = {"LISTEN": "127.0.0.1:0", "DRAIN_SECONDS": "1"}
    # Without a drafter: the orchestrator has nothing to do here.
    services = {"target": {**here, "ENGINE": "torch"}, "orchestrator": here}
    with running(StackSettings(services)) as stack:
        address, process = stack.addresses["target"], stack.processes["target"].id
        for name in options.beside:
            sizes = options.sequences, options.rounds
            found = asyncio.run(_measure(address, process, BESIDE[name], *sizes))
            table.add_row(name, *(f"{value:.2f}" for value in found))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()

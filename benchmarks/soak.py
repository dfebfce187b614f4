"""Thousands of short texts, one after another: whether memory returns to where it was.

python -m benchmarks.soak [--texts 10000]
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.measure.environment import RESULTS, describe
from benchmarks.measure.prompts import PROMPTS
from benchmarks.measure.services import serving
from tandem.drafter.v1 import drafter_pb2, drafter_pb2_grpc
from tandem.local.pair import Pair
from tandem.local.stack import Stack
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.target.v1 import target_pb2, target_pb2_grpc

_CLIENTS = 8
_NEW_TOKENS = 8
# Allocators, caches and thread stacks have grown to their size by then.
_WARM_UP = 1000


@dataclass(frozen=True)
class Memory:
    """Resident memory of one service.

    Attributes:
        service: its name.
        before_mib: after the warm-up.
        after_mib: after all texts.
        bytes_a_text: growth in between.
    """

    service: str
    before_mib: float
    after_mib: float
    bytes_a_text: float


def request(seed: int) -> pb.CompleteRequest:
    """A short text."""
    message = pb.Generation(
        prompt=PROMPTS[seed % len(PROMPTS)],
        stopping=pb.Stopping(max_new_tokens=_NEW_TOKENS, ignore_eos=True),
    )
    message.sampling.seed = seed
    return pb.CompleteRequest(generation=message)


async def run_texts(address: str, seeds: Iterator[int], progress: Progress, task: Any) -> None:
    """All of them, by a few clients."""

    async def work(stub: Any) -> None:
        for seed in seeds:
            await stub.Complete(request(seed), timeout=60)
            progress.advance(task)

    async with grpc.aio.insecure_channel(address) as channel:
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        await asyncio.gather(*(work(stub) for _ in range(_CLIENTS)))


def open_sequences(addresses: Mapping[str, str]) -> int:
    """Of both services with a model."""
    with (
        grpc.insecure_channel(addresses["drafter"]) as drafter,
        grpc.insecure_channel(addresses["target"]) as target,
    ):
        drafts = drafter_pb2_grpc.DrafterServiceStub(drafter)
        verdicts = target_pb2_grpc.TargetServiceStub(target)
        infos = (
            drafts.GetModelInfo(drafter_pb2.GetModelInfoRequest()),
            verdicts.GetModelInfo(target_pb2.GetModelInfoRequest()),
        )
        return sum(info.stats.open_sequences for info in infos)


def resident_mib(stack: Stack) -> dict[str, float]:
    """VmRSS of each service's process."""
    found = {}
    for name, process in stack.processes.items():
        status = Path(f"/proc/{process.id}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
        found[name] = int(line.split()[1]) / 1024
    return found


def main() -> None:
    """Measure, print and write benchmarks/results/soak.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=10_000)
    texts = parser.parse_args().texts
    with serving(Pair()) as stack, Progress() as progress:
        task = progress.add_task("texts", total=_WARM_UP + texts)
        orchestrator = stack.addresses["orchestrator"]
        asyncio.run(run_texts(orchestrator, iter(range(_WARM_UP)), progress, task))
        before = resident_mib(stack)
        asyncio.run(run_texts(orchestrator, iter(range(texts)), progress, task))
        after = resident_mib(stack)
        left_open = open_sequences(stack.addresses)
    found = [
        Memory(name, before[name], after[name], (after[name] - before[name]) * 2**20 / texts)
        for name in before
    ]
    table = Table("service", "before, MiB", "after, MiB", "bytes a text")
    for memory in found:
        table.add_row(
            memory.service,
            f"{memory.before_mib:.1f}",
            f"{memory.after_mib:.1f}",
            f"{memory.bytes_a_text:.0f}",
        )
    Console().print(table, f"sequences left open: {left_open}")
    RESULTS.mkdir(exist_ok=True)
    result = {
        "environment": describe(),
        "texts": texts,
        "left_open": left_open,
        "memory": [asdict(memory) for memory in found],
    }
    (RESULTS / "soak.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

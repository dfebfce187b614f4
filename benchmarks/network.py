"""Speed over a slower network: the same services, with a delay on every hop between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
from rich.progress import Progress

from benchmarks.concurrency import generations
from benchmarks.delay import DelayProxy
from tandem.load.generator import LoadGenerator
from tandem.load.method import BLOCK, PLAIN, Method
from tandem.load.report import LoadReport
from tandem.local.process import ServiceProcess
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc

METHODS = (PLAIN, BLOCK, Method("block", 8))
_READY_SECONDS = 30.0
_POLL_SECONDS = 0.1
_STOP_SECONDS = 15.0


@dataclass(frozen=True)
class Delayed:
    """One sequence at a time over a network of some delay.

    Attributes:
        delay_ms: added to each hop, one way; a drafted round takes four.
        method: as people read it.
        gamma: draft length.
        report: figures.
    """

    delay_ms: float
    method: str
    gamma: int
    report: LoadReport


async def delay_sweep(
    addresses: Mapping[str, str],
    delays_ms: Sequence[float],
    texts: int,
    new_tokens: int,
    progress: Progress,
) -> list[Delayed]:
    """Each delay between an orchestrator of its own and the running drafter and target."""
    bar = progress.add_task("network delay", total=len(delays_ms) * len(METHODS))
    found = []
    async with (
        DelayProxy(addresses["drafter"]).serving() as drafter,
        DelayProxy(addresses["target"]).serving() as target,
        _orchestrator(drafter.address, target.address) as address,
        LoadGenerator(address) as generator,
    ):
        for delay in delays_ms:
            drafter.delay_s = target.delay_s = delay / 1e3
            for method in METHODS:
                await generator.closed_loop(generations(method, 1, new_tokens), 1)
                timelines = await generator.closed_loop(generations(method, texts, new_tokens), 1)
                report = LoadReport.of(timelines)
                found.append(Delayed(delay, str(method), method.gamma, report))
                progress.advance(bar)
    return found


@asynccontextmanager
async def _orchestrator(drafter: str, target: str) -> AsyncIterator[str]:
    """An orchestrator that reaches both services where it is told to; its address."""
    settings = {
        "LISTEN": "127.0.0.1:0",
        "DRAFTERS": drafter,
        "TARGETS": target,
        "LOG_FORMAT": "json",
        "LOG_LEVEL": "info",
        "DRAIN_SECONDS": "2",
    }
    process = ServiceProcess(
        "orchestrator",
        "orchestrator",
        "127.0.0.1",
        {f"TANDEM_ORCHESTRATOR_{name}": value for name, value in settings.items()},
    )
    try:
        async with asyncio.timeout(_READY_SECONDS):
            await _ready(process)
        yield process.address
    finally:
        process.terminate()
        # Not on the event loop: its proxies carry the orchestrator's goodbyes.
        await asyncio.to_thread(process.wait, _STOP_SECONDS)


async def _ready(process: ServiceProcess) -> None:
    """Wait until it listens and has matched the pair."""
    while process.port is None:  # noqa: ASYNC110  # a thread reads it from the log
        await asyncio.sleep(_POLL_SECONDS)
    async with grpc.aio.insecure_channel(process.address) as channel:
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        while True:
            try:
                await stub.GetModelInfo(pb.GetModelInfoRequest())
                return
            except grpc.aio.AioRpcError:
                await asyncio.sleep(_POLL_SECONDS)

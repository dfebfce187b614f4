"""Speed over a slower network: the same services, with a delay on every hop between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rich.progress import Progress

from benchmarks.sweep.concurrency import generations
from benchmarks.sweep.delay_proxy import DelayProxy
from tandem.tools.load.generator import LoadGenerator
from tandem.tools.load.method import BLOCK, PLAIN, Method
from tandem.tools.load.report import LoadReport
from tandem.tools.local.stack import Stack, StackSettings

METHODS = (PLAIN, BLOCK, Method("block", 8))


@dataclass(frozen=True)
class Delayed:
    """One sequence at a time over a network of some delay.

    Attributes:
        delay_ms: added to each hop, one way; a drafted round has four hops.
        method: its name.
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
    """Run each delay, between a separate orchestrator and the running drafter and target."""
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
    """Start an orchestrator for a drafter and a target at these addresses; yields its address."""
    peers = {"DRAFTERS": drafter, "TARGETS": target}
    settings = {"LISTEN": "127.0.0.1:0", "DRAIN_SECONDS": "2", **peers}
    stack = Stack(StackSettings({"orchestrator": settings}))
    # In a thread: the event loop runs the proxies, which the orchestrator needs to start and stop.
    try:
        await asyncio.to_thread(stack.start)
        yield stack.addresses["orchestrator"]
    finally:
        await asyncio.to_thread(stack.drain)

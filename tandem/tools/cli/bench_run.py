"""What `tandem bench` runs: a load, or one rate after the other, until the end or an interrupt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from rich.progress import Progress

from tandem.client.connection import Connection
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.rpc.endpoint import Endpoint
from tandem.tools.cli.display.terminal import err, tell
from tandem.tools.load.generator import LoadGenerator
from tandem.tools.load.http_generator import HttpLoadGenerator
from tandem.tools.load.objective import Objective
from tandem.tools.load.sweep import Level, OpenLoop, sweep
from tandem.tools.load.timeline import Timeline


@dataclass(frozen=True)
class BenchLoad:
    """How texts are requested."""

    warm_up: int
    concurrency: int
    rate: float | None
    max_in_flight: int
    seed: int
    timeout_s: float
    http: bool = False

    def generator(self, endpoint: Endpoint) -> LoadGenerator:
        """Requests texts by gRPC or HTTP."""
        kind = HttpLoadGenerator if self.http else LoadGenerator
        return kind(endpoint, self.timeout_s)

    def check(self, endpoint: Endpoint) -> None:
        """Ask whether it serves, before anything is loaded; an HTTP front is asked at the start.

        Raises:
            Failure: it does not.
        """
        if not self.http:
            with Connection(endpoint) as client:
                client.info()

    def __str__(self) -> str:
        if self.rate is not None:
            return f"{self.rate:.4g} a second"
        return f"{self.concurrency} at a time"


def run(
    endpoint: Endpoint, generations: list[pb.Generation], load: BenchLoad
) -> tuple[list[Timeline], bool]:
    """Warm up, then run the load, with its progress on standard error.

    Returns:
        The texts that ended, and whether the load was interrupted.

    Raises:
        KeyboardInterrupt: interrupted before the first text ended.
    """
    warm_up, counted = generations[: load.warm_up], generations[load.warm_up :]

    done: list[Timeline] = []

    async def texts(tick: Callable[[], None]) -> list[Timeline]:
        def ended(text: Timeline) -> None:
            done.append(text)
            tick()

        async with load.generator(endpoint) as generator:
            await generator.closed_loop(warm_up, load.concurrency)
            if load.rate is None:
                return await generator.closed_loop(counted, load.concurrency, ended)
            return await generator.open_loop(
                counted, load.rate, load.seed, ended, load.max_in_flight
            )

    load.check(endpoint)
    with Progress(console=err, transient=True) as progress:
        task = progress.add_task("texts", total=len(counted))
        try:
            return asyncio.run(texts(lambda: progress.advance(task))), False
        except KeyboardInterrupt:
            if not done:
                raise
    tell(f"interrupted: {len(done)} of {len(counted)} texts had ended. Ctrl-C again stops at once")
    return done, True


def run_sweep(
    endpoint: Endpoint,
    request: Callable[[int], pb.Generation],
    load: BenchLoad,
    objective: Objective,
    seconds: float,
) -> tuple[list[Level], bool]:
    """Warm up, then run one rate after the other.

    Returns:
        The rates that were completed, and whether the sweep was interrupted.

    Raises:
        KeyboardInterrupt: interrupted before the first rate was completed.
    """
    done: list[Level] = []

    def ended(level: Level) -> None:
        done.append(level)
        tell(level)

    async def rates() -> list[Level]:
        async with load.generator(endpoint) as generator:
            warm_up = [request(number) for number in range(load.warm_up)]
            await generator.closed_loop(warm_up, load.concurrency)
            loop = OpenLoop(generator, request, seconds, objective, load.seed, load.max_in_flight)
            return await sweep(loop.level, load.rate or 1.0, loop.lowest, loop.highest, ended)

    load.check(endpoint)
    try:
        return asyncio.run(rates()), False
    except KeyboardInterrupt:
        if not done:
            raise
    tell(f"interrupted: {len(done)} rates had been run. Ctrl-C again stops at once")
    return done, True

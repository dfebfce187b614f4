"""Speed and latency by number of clients, in closed and open loops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import grpc
from rich.progress import Progress

from benchmarks.measure.texts import PROMPTS
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.target.v1 import target_pb2, target_pb2_grpc
from tandem.tools.load.generator import LoadGenerator
from tandem.tools.load.method import BLOCK, PLAIN, Method
from tandem.tools.load.report import LoadReport

METHODS = (BLOCK, PLAIN)
# An open loop at the closed loop's own rate would have no steady state.
OPEN_LOOP_SHARE = 0.7
_LEAST_TEXTS = 16


@dataclass(frozen=True)
class Load:
    """One load and its results.

    Attributes:
        loop: "closed" or "open".
        method: its name.
        concurrency: clients of the closed loop; the open loop's rate follows from it.
        rate: texts a second of the open loop.
        passes_per_round: target passes / rounds; less than 1 with batching.
        report: figures.
    """

    loop: str
    method: str
    concurrency: int
    rate: float | None
    passes_per_round: float
    report: LoadReport


async def concurrency_sweep(
    addresses: Mapping[str, str], levels: Sequence[int], new_tokens: int, progress: Progress
) -> list[Load]:
    """Closed loops by number of clients, each followed by an open loop at 0.7 of its rate."""
    bar = progress.add_task("concurrency", total=2 * len(levels) * len(METHODS))
    loads = []
    async with (
        LoadGenerator(addresses["orchestrator"]) as generator,
        grpc.aio.insecure_channel(addresses["target"]) as channel,
    ):
        target = target_pb2_grpc.TargetServiceStub(channel)

        async def load(method: Method, concurrency: int, rate: float | None) -> LoadReport:
            texts = generations(method, max(_LEAST_TEXTS, 2 * concurrency), new_tokens)
            before = await _forward_passes(target)
            if rate is None:
                timelines = await generator.closed_loop(texts, concurrency)
            else:
                timelines = await generator.open_loop(texts, rate, seed=concurrency)
            passes = await _forward_passes(target) - before
            report = LoadReport.of(timelines)
            rounds = sum(t.summary.rounds for t in timelines if t.summary is not None)
            loop = "closed" if rate is None else "open"
            share = passes / rounds if rounds else 0.0
            loads.append(Load(loop, str(method), concurrency, rate, share, report))
            progress.advance(bar)
            return report

        for concurrency in levels:
            for method in METHODS:
                closed = await load(method, concurrency, None)
                await load(method, concurrency, max(OPEN_LOOP_SHARE * closed.texts_per_s, 0.01))
    return loads


def generations(method: Method, count: int, new_tokens: int) -> list[pb.Generation]:
    """Texts at temperature 1 with seeds from 0."""
    return [
        method.request(PROMPTS[seed % len(PROMPTS)], 1.0, seed, new_tokens) for seed in range(count)
    ]


async def _forward_passes(target: object) -> int:
    # The stub's own type differs between grpcio's sync and async halves.
    reply = await target.GetModelInfo(  # type: ignore[attr-defined]
        target_pb2.GetModelInfoRequest()
    )
    return int(reply.stats.forward_passes)

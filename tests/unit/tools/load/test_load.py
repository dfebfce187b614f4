"""The load generator, and what its figures mean."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.tools.load.generator import LoadGenerator
from tandem.tools.load.report import LoadReport
from tandem.tools.load.timeline import Percentiles, Timeline


class SlowService(LoadGenerator):
    """Answers after a while, and remembers how many it was busy with."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.busy = self.most_busy = 0

    async def text(
        self, generation: pb.Generation, intended_s: float | None = None, *_: Any, **__: Any
    ) -> Timeline:
        asked = time.perf_counter()
        self.busy += 1
        self.most_busy = max(self.busy, self.most_busy)
        await asyncio.sleep(self.seconds)
        self.busy -= 1
        now = time.perf_counter()
        return Timeline(asked if intended_s is None else intended_s, asked, ((now, 1),), now)


GENERATIONS = [pb.Generation(prompt=str(number)) for number in range(12)]


def summary(accepted: int, drafted: int, gammas: list[int]) -> pb.Summary:
    return pb.Summary(
        accepted_tokens=accepted,
        drafted_tokens=drafted,
        gammas=gammas,
        draft_bytes=600,
        stages=pb.Stages(round_wall_ns=[9_000_000] * 2, round_model_ns=[7_000_000] * 2),
    )


TEXT = Timeline(10.0, 10.5, ((11.0, 1), (11.3, 3), (11.5, 2)), 11.6, "", summary(3, 8, [0, 4, 4]))


def test_times_count_from_the_intended_start() -> None:
    assert TEXT.tokens == 6
    assert TEXT.time_to_first_token_s == pytest.approx(1.0)
    assert TEXT.latency_s == pytest.approx(1.5)
    assert TEXT.time_per_output_token_s == pytest.approx(0.5 / 5)
    assert TEXT.gaps_s == pytest.approx([0.3, 0.2])


def test_rounds_are_the_orchestrators_where_it_drafted() -> None:
    assert TEXT.rounds_s == [0.009, 0.009]
    assert TEXT.beside_models_s == [0.002, 0.002]
    plain = Timeline(0, 0, TEXT.arrivals, 12, summary=pb.Summary(gammas=[0, 0]))
    assert plain.rounds_s == plain.gaps_s


def test_a_report_keeps_errors_apart() -> None:
    failed = Timeline(9.0, 9.0, ((9.5, 1),), 9.6, "UNAVAILABLE")
    report = LoadReport.of([TEXT, failed])
    assert report.errors == {"UNAVAILABLE": 1}
    assert report.texts == 1
    assert report.wall_s == pytest.approx(2.6)
    assert report.tokens_per_s == pytest.approx(6 / 2.6)
    assert report.acceptance == 3 / 8
    assert report.block_efficiency == 2.5
    assert report.bytes_per_token == 100
    assert report.ttft is not None
    assert report.ttft.p50 == pytest.approx(1000)
    assert len(report.tables()) == 2


def test_a_report_of_errors_alone_has_no_times() -> None:
    report = LoadReport.of([Timeline(0, 0, (), 1.0, "UNAVAILABLE")])
    assert report.latency is None
    assert report.tokens_per_s == 0
    assert len(report.tables()) == 2


def test_percentiles_are_milliseconds() -> None:
    found = Percentiles.of([0.001, 0.002, 0.003])
    assert found is not None
    assert (found.p50, found.p95, found.p99, found.mean) == pytest.approx((2, 2.9, 2.98, 2))
    assert Percentiles.of([]) is None


def test_a_report_says_why_calls_failed_the_commonest_first() -> None:
    errors = ["UNAVAILABLE: no target", *["INTERNAL: a bug"] * 3]
    errors += [f"UNKNOWN: {number}" for number in range(20)]
    report = LoadReport.of([Timeline(0, 0, (), 1.0, error) for error in errors])
    lines = report.failures()
    assert lines[0] == "3 x INTERNAL: a bug"
    assert "1 x UNAVAILABLE: no target" in lines
    assert lines[-1] == "and 12 other kinds"
    assert len(lines) == 11
    assert report.errors["UNKNOWN: 19"] == 1


async def test_an_error_keeps_its_status_and_the_beginning_of_its_details() -> None:
    class Refusal(grpc.GenericRpcHandler):
        def service(self, handler_call_details: object) -> Any:
            async def refuse(request: bytes, context: Any) -> AsyncIterator[bytes]:
                await context.abort(grpc.StatusCode.INTERNAL, "too\nlong " * 100)
                yield b""

            return grpc.unary_stream_rpc_method_handler(refuse)

    server = grpc.aio.server(handlers=[Refusal()])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with LoadGenerator(f"127.0.0.1:{port}") as generator:
        timeline = await generator.text(GENERATIONS[0])
    await server.stop(None)
    assert timeline.error.startswith("INTERNAL: too long too long")
    assert len(timeline.error) == 240


async def test_a_closed_loop_keeps_its_concurrency() -> None:
    service = SlowService(0.002)
    timelines = await service.closed_loop(GENERATIONS, 3)
    assert len(timelines) == len(GENERATIONS)
    assert service.most_busy == 3


async def test_an_open_loop_does_not_wait_for_the_service() -> None:
    service = SlowService(0.2)
    first = await service.open_loop(GENERATIONS, rate=1000, seed=1)
    assert service.most_busy == len(GENERATIONS)
    second = await service.open_loop(GENERATIONS, rate=1000, seed=1)
    starts = [
        [t.intended_s - timelines[0].intended_s for t in timelines] for timelines in (first, second)
    ]
    assert starts[0] == pytest.approx(starts[1])
    assert starts[0] == sorted(starts[0])

"""How a service ends: its drain waits for texts, and for nothing else."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from orchestrator.front.service import make_service
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.rpc.channel import connect
from tandem.rpc.process import serve
from tandem.rpc.server import RunningServer
from tests.support.processes.ports import free_port
from tests.support.waiting import HANG_SECONDS, until
from tests.support.wire.fakes import FakeDrafter, FakeTarget, generation, serve_fakes

SERVICE = "tandem.orchestrator.v1.OrchestratorService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@asynccontextmanager
async def serving(
    *fakes: FakeDrafter | FakeTarget,
) -> AsyncIterator[tuple[asyncio.Task[None], grpc.aio.Channel]]:
    """An orchestrator that takes our signals, and a channel to it once it is ready."""
    address = f"127.0.0.1:{free_port()}"
    async with serve_fakes(*fakes, listen=address, drain_seconds=600) as settings:
        running = asyncio.create_task(serve(settings, make_service))
        async with connect(address) as channel:
            await watching(channel, SERVING)
            yield running, channel


async def watching(channel: grpc.aio.Channel, status: Any) -> Any:
    """A watch that has said a status."""
    watch = health_pb2_grpc.HealthStub(channel).Watch(
        health_pb2.HealthCheckRequest(service=SERVICE), wait_for_ready=True
    )
    async with asyncio.timeout(HANG_SECONDS):
        while (await watch.read()).status != status:
            pass
    return watch


async def test_what_a_ready_service_has_loaded_is_not_looked_through_for_garbage() -> None:
    gc.unfreeze()  # what the tests have kept out themselves
    async with serving(FakeDrafter(), FakeTarget()) as (running, _):
        await until(lambda: gc.get_freeze_count() > 0)
        os.kill(os.getpid(), signal.SIGTERM)
        await running


async def test_an_open_watch_hears_of_the_drain_and_does_not_hold_it() -> None:
    async with serving(FakeDrafter(), FakeTarget()) as (running, channel):
        watch = await watching(channel, SERVING)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (await watch.read()).status == NOT_SERVING
        assert await watch.read() is grpc.aio.EOF
        assert await watch.code() == grpc.StatusCode.OK
        async with asyncio.timeout(HANG_SECONDS):  # much less than a drain may take
            await running


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_the_drain(second: signal.Signals) -> None:
    drafter, target = FakeDrafter(), FakeTarget()

    async def hang(round_: int | None, context: Any) -> None:
        if round_ == 1:
            await asyncio.Event().wait()

    target.interfere = hang
    async with serving(drafter, target) as (running, channel):
        stub: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        call = stub.Generate(pb.GenerateRequest(generation=generation()))
        await call.read()
        watch = await watching(channel, SERVING)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (await watch.read()).status == NOT_SERVING
        await asyncio.sleep(0.2)
        assert not running.done()
        os.kill(os.getpid(), second)
        async with asyncio.timeout(HANG_SECONDS):  # much less than a drain may take
            await running
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
        await until(lambda: (drafter.ended, target.ended) == (1, 1))


async def test_a_connection_of_a_great_age_is_given_up_behind_its_last_text() -> None:
    drafter, target = FakeDrafter(), FakeTarget()

    async def wait(round_: int | None, context: Any) -> None:
        if round_ == 2:
            await asyncio.sleep(1.0)  # longer than a connection may last

    target.interfere = wait
    async with serve_fakes(drafter, target, connection_seconds=0.2) as settings:
        server = RunningServer("127.0.0.1:0", make_service(settings))
        await server.start()
        await server.ready()
        async with connect(f"127.0.0.1:{server.port}") as channel:
            stub: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
            text = pb.CompleteRequest(generation=generation())
            assert list((await stub.Complete(text)).token_ids) == target.text(20)
            # It was asked to leave while its text went on; nobody needs another one now.
            async with asyncio.timeout(HANG_SECONDS):
                await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
            assert list((await stub.Complete(text)).token_ids) == target.text(20)
        await server.stop(1.0)

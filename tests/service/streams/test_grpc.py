"""The behaviour of grpcio that we rely on, written down as tests."""

from __future__ import annotations

import asyncio
import gc

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tandem.rpc.channel import connect, server_options
from tests.service.conftest import Stack
from tests.support.wire.steps import open_verify
from tests.support.wire.talk import Talk


async def test_an_abandoned_call_is_cancelled(stack: Stack) -> None:
    """Why grpcio is held below 1.83: from there on a call that is dropped without a cancel
    is never collected (grpc/grpc#43462), and its sequence lives as long as the channel."""
    call = Talk(stack.target.Verify())
    await call.write(open_verify())
    await call.read()
    assert await stack.open_sequences() == 1
    del call
    gc.collect()
    for _ in range(50):
        if not await stack.open_sequences():
            break
        await asyncio.sleep(0.02)
    assert await stack.open_sequences() == 0
    assert tuple(map(int, grpc.__version__.split(".")[:2])) < (1, 83)


async def serve_health(address: str) -> tuple[grpc.aio.Server, int]:
    server = grpc.aio.server(options=server_options(1 << 20))
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port(address)
    await server.start()
    return server, port


async def test_a_channel_does_not_wait_for_what_another_one_met() -> None:
    """Channels of a process share connections and backoffs unless they are told not to: one to a
    server that is back failed at once, as long as a call of an older channel was kept."""
    asked = health_pb2.HealthCheckRequest()
    lost, port = await serve_health("127.0.0.1:0")
    before = connect(f"127.0.0.1:{port}")
    stub = health_pb2_grpc.HealthStub(before)
    kept = stub.Watch(asked)
    await kept.read()
    await lost.stop(None)
    with pytest.raises(grpc.aio.AioRpcError):
        await stub.Check(asked)
    await before.close()
    back, _ = await serve_health(f"127.0.0.1:{port}")
    async with connect(f"127.0.0.1:{port}") as after:
        answer = await health_pb2_grpc.HealthStub(after).Check(asked)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    await back.stop(None)
    assert await kept.code() is not grpc.StatusCode.OK  # kept until here

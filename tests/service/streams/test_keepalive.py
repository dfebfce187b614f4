"""A peer that vanishes without closing its connection."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.rpc.channel import (
    CLIENT_OPTIONS,
    KEEPALIVE_TIME_MS,
    KEEPALIVE_TIMEOUT_MS,
    server_options,
)
from tandem.rpc.health import Health
from tests.support.repository import ROOT
from tests.support.waiting import HANG_SECONDS

# Nobody waits for 15 seconds here.
FASTER = 10
SECONDS = (KEEPALIVE_TIME_MS + KEEPALIVE_TIMEOUT_MS) / 1000 / FASTER


class Line:
    """A way to a server, that can be cut without either end hearing of it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.is_cut = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        await asyncio.gather(self._pass(reader, back), self._pass(there, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(4096):
            if not self.is_cut:
                writer.write(data)
        writer.close()


async def test_it_is_noticed_in_the_time_that_is_said() -> None:
    """Ten times as fast as they are set; a time that is not set stays as long as it is."""
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(Health(), server)
    line = Line(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    between = await asyncio.start_server(line, "127.0.0.1", 0)
    address = f"127.0.0.1:{between.sockets[0].getsockname()[1]}"
    times = (KEEPALIVE_TIME_MS, KEEPALIVE_TIMEOUT_MS)
    options = [
        (name, value // FASTER if value in times else value) for name, value in CLIENT_OPTIONS
    ]
    try:
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            line.is_cut = True
            started = time.monotonic()
            with pytest.raises(grpc.aio.AioRpcError) as lost:
                await asyncio.wait_for(watch.read(), 5 * SECONDS)
            assert lost.value.code() == grpc.StatusCode.UNAVAILABLE
            assert time.monotonic() - started > SECONDS / 4
    finally:
        between.close()
        await server.stop(0)


async def test_a_client_that_pings_too_often_is_cut_off() -> None:
    """As docs/errors.md says it. gRPC's clients ping once a second at most."""
    page = (ROOT / "docs" / "errors.md").read_text()
    row = next(line for line in page.splitlines() if "Too many pings" in line)
    assert f"every {KEEPALIVE_TIME_MS // 2000} seconds" in row
    server = grpc.aio.server(options=server_options(1 << 20))
    health_pb2_grpc.add_HealthServicer_to_server(Health(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    pings = [("grpc.keepalive_time_ms", 1000), ("grpc.http2.max_pings_without_data", 0)]
    try:
        async with grpc.aio.insecure_channel(address, options=pings) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(grpc.aio.AioRpcError, match="Too many pings") as lost:
                await asyncio.wait_for(watch.read(), HANG_SECONDS)
            assert lost.value.code() == grpc.StatusCode.UNAVAILABLE
    finally:
        await server.stop(0)

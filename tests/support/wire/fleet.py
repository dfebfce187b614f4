"""An orchestrator in this process that finds its targets, the pods, by a DNS name."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from orchestrator.front.service import make_service
from orchestrator.settings import OrchestratorSettings
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.rpc.channel import connect
from tandem.rpc.server import RunningServer
from tests.support.waiting import HANG_SECONDS
from tests.support.wire.fake_carrier import FakeContext
from tests.support.wire.fakes import FakeDrafter, FakeTarget, add_fake, request
from tests.support.wire.names import Names, serve_names

SERVICE = "tandem.orchestrator.v1.OrchestratorService"
NAME = "targets.test"


class Fleet:
    """An orchestrator that finds its pods by a name; each pod has its own address.

    Attributes:
        names: the name server.
        stub: of the orchestrator.
    """

    def __init__(self, names: Names, stack: AsyncExitStack) -> None:
        self.names = names
        self._stack = stack
        self._servers: dict[str, grpc.aio.Server] = {}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        names.records[NAME] = []
        self.stub: Any = None

    async def start(self, *fakes: FakeTarget) -> list[str]:
        """Start pods, and add them to the name once they listen; returns their addresses."""
        hosts = []
        for fake in fakes:
            host = f"127.0.0.{2 + len(self._servers)}"
            await self.serve(host, fake)
            hosts.append(host)
        self.names.records[NAME] += hosts
        return hosts

    async def serve(self, host: str, fake: FakeTarget | FakeDrafter, port: int = 0) -> None:
        """Start a fake at an address."""
        server = self._servers[host] = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        await add_fake(fake, server)
        assert server.add_insecure_port(f"{host}:{port or self.port}")
        await server.start()

    async def kill(self, host: str) -> None:
        """Stop a pod; its address may still be in the name."""
        await self._servers[host].stop(0)

    async def orchestrate(self, **settings: Any) -> None:
        """Start the orchestrator."""
        targets = (f"dns://127.0.0.1:{self.names.port}/{NAME}:{self.port}",)
        fields: dict[str, Any] = {"targets": targets, "drafters": (), "resolve_seconds": 0.1}
        fields["gamma"] = 4  # so that rounds are predictable
        fields["failover_seconds"] = 0.0  # failures show at once
        fields["peer_plaintext"] = "allow"
        self.server = RunningServer(
            "127.0.0.1:0", make_service(OrchestratorSettings(**(fields | settings)))
        )
        await self.server.start()
        self._stack.push_async_callback(self.server.stop, 0.2)
        channel = connect(f"127.0.0.1:{self.server.port}")
        await self._stack.enter_async_context(channel)
        self.stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        self._health = health_pb2_grpc.HealthStub(channel)

    async def is_serving(self) -> bool:
        reply = await self._health.Check(health_pb2.HealthCheckRequest(service=SERVICE))
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    def is_of(self, fingerprint: str) -> Callable[[], Any]:
        """A condition: the orchestrator serves the model with this fingerprint."""

        async def served() -> bool:
            try:
                info = await self.stub.GetModelInfo(pb.GetModelInfoRequest())
            except grpc.aio.AioRpcError as error:  # for a moment, between two models
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    raise
                return False
            return bool(info.target.fingerprint == fingerprint)

        return served

    async def text(self, **changes: Any) -> Any:
        changes = {"speculation": {"gamma": 0}} | changes
        return await self.stub.Complete(request(**changes), timeout=HANG_SECONDS)

    async def close(self) -> None:
        await asyncio.gather(*(server.stop(0) for server in self._servers.values()))


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        fleet = Fleet(await stack.enter_async_context(serve_names()), stack)
        stack.push_async_callback(fleet.close)
        yield fleet


@asynccontextmanager
async def held(*targets: FakeTarget) -> AsyncIterator[asyncio.Event]:
    """Hold texts in their second round until the block ends, or the event is set."""
    go_on = asyncio.Event()

    async def wait(round_: int | None, context: FakeContext) -> None:
        if round_ == 2:
            await go_on.wait()

    for target in targets:
        target.interfere = wait
    try:
        yield go_on
    finally:
        go_on.set()


async def serves(fleet: Fleet, target: FakeTarget) -> bool:
    before = target.opened
    for _ in range(3):
        await fleet.text(stopping={"max_new_tokens": 1})
    return target.opened == before + 3

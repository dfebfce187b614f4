"""The three services in this process, over real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from drafter_svc.servicer import make_service as make_drafter
from drafter_svc.settings import DrafterSettings
from orchestrator.front.service import make_service as make_orchestrator
from orchestrator.settings import OrchestratorSettings
from tandem.drafter.v1 import drafter_pb2, drafter_pb2_grpc
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.peers.grpc import connection
from tandem.rpc import channel
from tandem.rpc.server import RunningServer, Service
from tandem.target.v1 import target_pb2, target_pb2_grpc
from target_svc.servicer import make_service as make_target
from target_svc.settings import TargetSettings
from tests.support.models.once import load_once


@dataclass
class Stack:
    """Stubs of running services."""

    drafter: Any
    target: Any
    orchestrator: Any
    channels: dict[str, grpc.aio.Channel]

    async def open_sequences(self) -> int:
        drafter = await self.drafter.GetModelInfo(drafter_pb2.GetModelInfoRequest())
        target = await self.target.GetModelInfo(target_pb2.GetModelInfoRequest())
        return int(drafter.stats.open_sequences + target.stats.open_sequences)


async def start(
    stack: AsyncExitStack, service: Service, admin_listen: str | None = None
) -> RunningServer:
    """Start a service on a free port, and stop it with the stack."""
    server = RunningServer("127.0.0.1:0", service, admin_listen=admin_listen)
    await server.start()
    stack.push_async_callback(server.stop, 1.0)
    return server


def address_of(server: RunningServer) -> str:
    return f"127.0.0.1:{server.port}"


async def connect(stack: AsyncExitStack, address: str) -> grpc.aio.Channel:
    return await stack.enter_async_context(channel.connect(address))


@asynccontextmanager
async def serving(random_pair: tuple[Path, Path], **bounds: Any) -> AsyncIterator[Stack]:
    """All three, ready, serving a pair; `bounds` are settings of drafter and target."""
    small: dict[str, Any] = {"max_sequences": 4, "max_gamma": 8, "admission_seconds": 0.2} | bounds
    drafter_model, target_model = map(str, random_pair)
    async with AsyncExitStack() as stack:
        drafter = await start(stack, make_drafter(DrafterSettings(model=drafter_model, **small)))
        target = await start(stack, make_target(TargetSettings(model=target_model, **small)))
        settings = OrchestratorSettings(
            drafters=(address_of(drafter),), targets=(address_of(target),), gamma=4
        )
        orchestrator = await start(stack, make_orchestrator(settings))
        await orchestrator.ready()
        channels = [
            await connect(stack, address_of(server)) for server in (drafter, target, orchestrator)
        ]
        yield Stack(
            drafter_pb2_grpc.DrafterServiceStub(channels[0]),
            target_pb2_grpc.TargetServiceStub(channels[1]),
            orchestrator_pb2_grpc.OrchestratorServiceStub(channels[2]),
            dict(zip(("drafter", "target", "orchestrator"), channels, strict=True)),
        )


@pytest.fixture(autouse=True, scope="module")
def _checkpoints_loaded_once() -> Iterator[None]:
    """A third of what most services here compute is their start."""
    with pytest.MonkeyPatch.context() as patch:
        load_once(patch)
        yield


@pytest.fixture
async def stack(random_pair: tuple[Path, Path]) -> AsyncIterator[Stack]:
    """All three, ready, serving the random pair."""
    async with serving(random_pair) as stack:
        yield stack


@pytest.fixture
def attentive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The orchestrator looks at its connections all the time."""
    monkeypatch.setattr(connection, "_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(connection, "_AGAIN_SECONDS", 0.05)
    monkeypatch.setattr(connection, "_HANDOVER_SECONDS", 0.05)

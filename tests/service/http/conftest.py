"""Orchestrators with an HTTP front, over the embedded pair."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import pytest_asyncio
from grpc.aio import Channel

from drafter_svc.servicer import make_service as make_drafter
from drafter_svc.settings import DrafterSettings
from orchestrator.front.service import make_service as make_orchestrator
from orchestrator.settings import OrchestratorSettings
from tandem.drafter.v1 import drafter_pb2_grpc
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.rpc.server import RunningServer
from tandem.target.v1 import target_pb2_grpc
from target_svc.servicer import make_service as make_target
from target_svc.settings import TargetSettings
from tests.service.conftest import Stack, address_of, connect, start
from tests.support.waiting import HANG_SECONDS, until


@dataclass
class Fronts:
    """An orchestrator by both of its fronts.

    Attributes:
        http: client of the front.
        openai: the same by OpenAI's own package.
        services: the stubs.
        address: host:port of the HTTP front.
        server: of it.
    """

    http: httpx2.AsyncClient
    openai: openai.AsyncOpenAI
    services: Stack
    address: str
    server: Any


IN_ONE_LOOP = pytest.mark.asyncio(loop_scope="module")


@dataclass
class ServedPair:
    """A drafter and a target that serve.

    Attributes:
        addresses: by service.
        channels: to them.
    """

    addresses: dict[str, str]
    channels: dict[str, Channel]

    async def open_sequences(self) -> int:
        return await self.stubs({}).open_sequences()

    def stubs(self, more: dict[str, Channel]) -> Stack:
        """Of both, and of an orchestrator if `more` has a channel to one."""
        channels = self.channels | more
        return Stack(
            drafter_pb2_grpc.DrafterServiceStub(channels["drafter"]),
            target_pb2_grpc.TargetServiceStub(channels["target"]),
            orchestrator_pb2_grpc.OrchestratorServiceStub(more["orchestrator"]) if more else None,
            channels,
        )


@asynccontextmanager
async def serving_pair(models: tuple[Path, Path]) -> AsyncIterator[ServedPair]:
    """A drafter and a target of eight sequences of 2,048 tokens each."""
    small, large = map(str, models)
    room: dict[str, Any] = {"max_sequences": 8, "max_length": 2048}
    async with AsyncExitStack() as stack:
        drafter = await start(stack, make_drafter(DrafterSettings(model=small, **room)))
        target = await start(stack, make_target(TargetSettings(model=large, **room)))
        addresses = {"drafter": address_of(drafter), "target": address_of(target)}
        channels = {name: await connect(stack, one) for name, one in addresses.items()}
        yield ServedPair(addresses, channels)


@asynccontextmanager
async def fronting(pair: ServedPair, **settings: Any) -> AsyncIterator[Fronts]:
    """An orchestrator over a pair, which has nothing open at the end; `settings` are its own."""
    async with AsyncExitStack() as stack:
        given = OrchestratorSettings(
            drafters=(pair.addresses["drafter"],),
            targets=(pair.addresses["target"],),
            http_listen="127.0.0.1:0",
            **{"gamma": 4, **settings},
        )
        service = make_orchestrator(given)
        server: RunningServer = await start(stack, service)
        await server.ready()
        address = f"127.0.0.1:{service.fronts[0].port}"
        stubs = pair.stubs({"orchestrator": await connect(stack, address_of(server))})
        # Nothing is encrypted, so that no certificates need be read.
        http = await stack.enter_async_context(
            httpx2.AsyncClient(base_url=f"http://{address}", timeout=HANG_SECONDS, verify=False)
        )
        client = openai.AsyncOpenAI(
            base_url=f"http://{address}/v1",
            api_key="none",
            max_retries=0,
            timeout=HANG_SECONDS,
            http_client=openai.DefaultAsyncHttpxClient(verify=False),
        )
        await stack.enter_async_context(client)
        yield Fronts(http, client, stubs, address, service.fronts[0])
    await until(lambda: _idle(pair))


async def _idle(pair: ServedPair) -> bool:
    return await pair.open_sequences() == 0


@asynccontextmanager
async def serving_http(models: tuple[Path, Path], **settings: Any) -> AsyncIterator[Fronts]:
    """An orchestrator over a pair of its own; `settings` are its own."""
    async with serving_pair(models) as pair, fronting(pair, **settings) as fronts:
        yield fronts


# One pair, and one orchestrator with default settings, for all tests of a file, which have the
# module's loop: `pytestmark = IN_ONE_LOOP`. They change nothing about these services.


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served_pair(embedded_pair: tuple[Path, Path]) -> AsyncIterator[ServedPair]:
    async with serving_pair(embedded_pair) as pair:
        yield pair


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_fronts(served_pair: ServedPair) -> AsyncIterator[Fronts]:
    """With default settings, gamma 4."""
    async with fronting(served_pair) as fronts:
        yield fronts


@pytest_asyncio.fixture(loop_scope="module")
async def fronts(shared_fronts: Fronts, served_pair: ServedPair) -> AsyncIterator[Fronts]:
    """For one test, which leaves nothing open to the next."""
    yield shared_fronts
    await until(lambda: _idle(served_pair))

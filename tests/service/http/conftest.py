"""An orchestrator with an HTTP front, over the embedded pair."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

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
from tests.support.waiting import HANG_SECONDS


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


@asynccontextmanager
async def serving_http(pair: tuple[Path, Path], **settings: Any) -> AsyncIterator[Fronts]:
    """An orchestrator over a pair; `settings` are its own."""
    small, large = map(str, pair)
    async with AsyncExitStack() as stack:
        drafter = await start(stack, make_drafter(DrafterSettings(model=small, max_sequences=8)))
        target = await start(stack, make_target(TargetSettings(model=large, max_sequences=8)))
        given = OrchestratorSettings(
            drafters=(address_of(drafter),),
            targets=(address_of(target),),
            http_listen="127.0.0.1:0",
            **{"gamma": 4, **settings},
        )
        service = make_orchestrator(given)
        server: RunningServer = await start(stack, service)
        await server.ready()
        address = f"127.0.0.1:{service.fronts[0].port}"
        channels = [await connect(stack, address_of(one)) for one in (drafter, target, server)]
        stubs = Stack(
            drafter_pb2_grpc.DrafterServiceStub(channels[0]),
            target_pb2_grpc.TargetServiceStub(channels[1]),
            orchestrator_pb2_grpc.OrchestratorServiceStub(channels[2]),
            dict(zip(("drafter", "target", "orchestrator"), channels, strict=True)),
        )
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


@pytest.fixture
async def fronts(embedded_pair: tuple[Path, Path]) -> AsyncIterator[Fronts]:
    """With default settings, gamma 4."""
    async with serving_http(embedded_pair) as fronts:
        yield fronts

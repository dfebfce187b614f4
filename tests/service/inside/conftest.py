"""A target that drafts, over real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from orchestrator.front.service import make_service as make_orchestrator
from orchestrator.settings import OrchestratorSettings
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.target.v1 import target_pb2_grpc
from target_svc.servicer import make_service as make_target
from target_svc.settings import TargetSettings
from tests.service.conftest import address_of, connect, start


class Inside:
    """Starts targets of the random pair that draft themselves, and orchestrators."""

    def __init__(self, stack: AsyncExitStack, pair: tuple[Path, Path]) -> None:
        self._stack = stack
        self._model = str(pair[1])

    async def target(self, drafts: str = "model", **settings: Any) -> str:
        """The address of a target."""
        chosen: dict[str, Any] = {"max_gamma": 8} | settings
        service = make_target(TargetSettings(model=self._model, drafts=drafts, **chosen))
        server = await start(self._stack, service)
        await server.ready()
        return address_of(server)

    async def stub(self, address: str) -> Any:
        """Of a target."""
        return target_pb2_grpc.TargetServiceStub(await connect(self._stack, address))

    async def orchestrator(self, *targets: str, ready: bool = True, **settings: Any) -> Any:
        """The stub of an orchestrator; without drafters, unless the settings name some."""
        # A target that stands still on a busy machine is waited for.
        patient = {"stage_floor_seconds": 60.0, "draft_seconds": 60.0}
        chosen: dict[str, Any] = {"drafters": (), "gamma": 4, **patient} | settings
        service = make_orchestrator(OrchestratorSettings(targets=targets, **chosen))
        server = await start(self._stack, service)
        if ready:
            await server.ready()
        channel = await connect(self._stack, address_of(server))
        return orchestrator_pb2_grpc.OrchestratorServiceStub(channel)


@pytest.fixture
async def inside(
    random_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Inside]:
    monkeypatch.setenv("TANDEM_DRAFTER_MODEL", str(random_pair[0]))
    async with AsyncExitStack() as stack:
        yield Inside(stack, random_pair)

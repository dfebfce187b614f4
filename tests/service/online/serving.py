"""A drafter that learns, through real sockets; its trainer says what a test has it say."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn

from drafter_svc.servicer import DrafterServicer, service_of
from drafter_svc.settings import DrafterSettings
from orchestrator.front.service import make_service as make_orchestrator
from orchestrator.settings import OrchestratorSettings
from tandem.common.v1 import prefix_cache_pb2_grpc
from tandem.drafter.v1 import drafter_pb2, drafter_pb2_grpc, learning_pb2_grpc
from tandem.online.learning import Learning
from tandem.online.order import Order
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from target_svc.servicer import make_service as make_target
from target_svc.settings import TargetSettings
from tests.service.conftest import address_of, connect, start
from tests.support.waiting import until
from tests.support.wire.scrape import ANY_PORT

MEASURED = {"served": 0.6, "trained": 0.65, "error": 0.01, "unsaid": -0.2, "home": 0.01}


class FakeTrainer:
    """In a trainer's place."""

    newest: FakeTrainer

    def __init__(self, order: Order, said: Callable[..., None], ended: Callable[..., None]) -> None:
        self.order, self._said = order, said
        FakeTrainer.newest = self

    def offer(self, model: nn.Module) -> None:
        path = Path(self.order.folder) / "offers" / "offer-0001.safetensors"
        path.parent.mkdir(exist_ok=True)
        weights = {name: each.detach().clone() for name, each in model.named_parameters()}
        save_file(weights, path)
        told = {"measured": {**MEASURED, "steps": 25}, "fault": "", "offer": path.name}
        self._said(self, told)

    def end(self) -> None:
        """Nothing to end."""


@dataclass
class Served:
    """A drafter that learns."""

    servicer: DrafterServicer
    address: str
    draft: Callable[[], Any]
    info: Callable[[], Any]
    admin: Any
    prefixes: Any
    metrics: int
    folder: Path

    @property
    def learning(self) -> Learning:
        assert self.servicer.loaded.learning is not None
        return self.servicer.loaded.learning

    async def change(self, model: nn.Module) -> None:
        """Have new weights served."""
        version = self.learning.status.version
        FakeTrainer.newest.offer(model)
        await until(lambda: self.learning.status.version == version + 1)


@asynccontextmanager
async def drafting(stack: AsyncExitStack, model: Path, folder: Path, **keys: Any) -> Any:
    settings: dict[str, Any] = {"model": str(model), "online": 30, "online_folder": folder}
    settings |= {"cache_tokens": 2048, "max_length": 256, "max_gamma": 8, **keys}
    servicer = DrafterServicer(DrafterSettings(metrics_listen=ANY_PORT, **settings))
    server = await start(stack, service_of(servicer), "127.0.0.1:0")
    await server.ready()
    operator = await connect(stack, f"127.0.0.1:{server.admin_port}")
    stub: Any = drafter_pb2_grpc.DrafterServiceStub(await connect(stack, address_of(server)))
    assert servicer.metering is not None
    found = Served(
        servicer,
        address_of(server),
        stub.Draft,
        lambda: stub.GetModelInfo(drafter_pb2.GetModelInfoRequest()),
        learning_pb2_grpc.LearningServiceStub(operator),
        prefix_cache_pb2_grpc.PrefixCacheServiceStub(operator),
        servicer.metering.port,
        folder,
    )
    if settings["online"]:
        await until(lambda: found.learning.status.training)
    yield found


@asynccontextmanager
async def served(drafter: Served, target: Path, **keys: Any) -> AsyncIterator[Any]:
    """The address and the stub of an orchestrator over a drafter.

    Args:
        drafter: that learns.
        target: checkpoint of its target.
        keys: further settings of the target.
    """
    async with AsyncExitStack() as stack:
        server = await start(stack, make_target(TargetSettings(model=str(target), **keys)))
        settings = OrchestratorSettings(
            drafters=(drafter.address,),
            targets=(address_of(server),),
            stage_floor_seconds=60.0,
            draft_seconds=60.0,
        )
        front = await start(stack, make_orchestrator(settings))
        await front.ready()
        channel = await connect(stack, address_of(front))
        yield address_of(front), orchestrator_pb2_grpc.OrchestratorServiceStub(channel)

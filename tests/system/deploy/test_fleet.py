"""Several targets and drafters as processes, behind names: they join and leave under load."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.drafter.v1 import drafter_pb2, drafter_pb2_grpc
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.target.v1 import target_pb2, target_pb2_grpc
from tandem.tools.local.process import ServiceProcess
from tests.support.processes.fork_server import Forked
from tests.support.processes.ports import free_port
from tests.support.processes.services import READY_SECONDS, generation, is_serving
from tests.support.wire.names import Names, serve_names

pytestmark = pytest.mark.campaign(
    "replicas as processes join and leave under load",
    "service/replicas: the same in one process; unit/peers",
)

CLIENTS = 8
# A pod that its name has takes work after at most so long.
JOIN_SECONDS = 10


class Fleet:
    """Processes by name, each at an address of its own.

    Attributes:
        names: the name server, which has a pod from when it is ready, as Kubernetes does it.
    """

    def __init__(self, names: Names, models: tuple[Path, Path], logs: Path) -> None:
        self.names = names
        self._models = dict(zip(("drafter", "target"), map(str, models), strict=True))
        self._logs = logs
        self.processes: dict[str, ServiceProcess] = {}
        self._ports = {role: free_port() for role in ("drafter", "target")}

    def start(self, role: str, host: str, model: str = "") -> None:
        settings = {"MODEL": model or self._models[role], "LISTEN": f"{host}:{self._ports[role]}"}
        self._run(role, host, {**settings, "THREADS": "1"})

    def orchestrate(self) -> None:
        places = {
            f"{role.upper()}S": f"dns://127.0.0.1:{self.names.port}/{role}s.test:{port}"
            for role, port in self._ports.items()
        }
        self._run(
            "orchestrator",
            "127.0.0.1",
            {"LISTEN": "127.0.0.1:0", "PEER_PLAINTEXT": "allow", **places},
        )

    def _run(self, role: str, host: str, settings: dict[str, str]) -> None:
        module = "orchestrator" if role == "orchestrator" else f"{role}_svc"
        own = {f"TANDEM_{role.upper()}_{key}": value for key, value in settings.items()}
        own[f"TANDEM_{role.upper()}_LOG_FORMAT"] = "json"
        log = self._logs / f"{role}-{host}.log"
        start: Any = Forked
        self.processes[f"{role} {host}"] = ServiceProcess(role, module, host, own, log, start=start)

    async def ready(self, role: str, host: str) -> None:
        """Wait for a service, then have its name know it."""
        process = self.processes[f"{role} {host}"]
        name = f"tandem.{role}.v1.{role.capitalize()}Service"
        deadline = time.monotonic() + READY_SECONDS
        while process.port is None or not is_serving(process.address, name):
            assert time.monotonic() < deadline, process.last_lines()
            await asyncio.sleep(0.1)
        if role != "orchestrator":
            self.names.records.setdefault(f"{role}s.test", []).append(host)

    async def opened(self, role: str, host: str) -> int:
        """Sequences that a pod has been given so far."""
        return int((await self._stats(role, host)).opened_sequences)

    async def held(self, role: str, host: str) -> int:
        """Sequences that a pod has now."""
        return int((await self._stats(role, host)).open_sequences)

    async def _stats(self, role: str, host: str) -> Any:
        kind, stub = (
            (target_pb2, target_pb2_grpc.TargetServiceStub)
            if role == "target"
            else (drafter_pb2, drafter_pb2_grpc.DrafterServiceStub)
        )
        async with grpc.aio.insecure_channel(f"{host}:{self._ports[role]}") as channel:
            asked: Any = stub(channel)
            return (await asked.GetModelInfo(kind.GetModelInfoRequest())).stats


@contextmanager
def ended(processes: dict[str, ServiceProcess]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes.values():
            process.kill()


@pytest.fixture
async def fleet(random_pair: tuple[Path, Path], tmp_path: Path) -> AsyncIterator[Fleet]:
    """Two drafters, two targets and an orchestrator."""
    async with serve_names() as names:
        fleet = Fleet(names, random_pair, tmp_path)
        with ended(fleet.processes):
            pods = [(role, host) for role in ("drafter", "target") for host in HOSTS]
            for role, host in pods:
                fleet.start(role, host)
            for role, host in pods:
                await fleet.ready(role, host)
            fleet.orchestrate()
            await fleet.ready("orchestrator", "127.0.0.1")
            yield fleet


HOSTS = ("127.0.0.2", "127.0.0.3")


class Load:
    """Clients who ask for text after text. Any that fails ends the test."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub
        self.texts = 0
        self.drafted = 0

    async def _client(self, number: int) -> None:
        seed = number
        while True:
            seed += CLIENTS
            asked = generation([1, 2, 3], max_new_tokens=24, seed=seed, gamma=3)
            reply = await self._stub.Complete(pb.CompleteRequest(generation=asked), timeout=60)
            assert len(reply.token_ids) == 24
            self.texts += 1
            self.drafted += not reply.summary.drafter_lost

    async def more(self, count: int) -> None:
        """Wait for so many more texts."""
        goal = self.texts + count
        async with asyncio.timeout(120):
            while self.texts < goal:
                for task in self.tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.02)

    async def until(self, reached: Callable[[], Any]) -> float:
        """Go on until something is the case; the seconds that took."""
        started = time.monotonic()
        while not await reached():
            await self.more(1)
        return time.monotonic() - started

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.tasks = [asyncio.create_task(self._client(number)) for number in range(CLIENTS)]
        try:
            yield
        finally:
            for task in self.tasks:
                task.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)


async def test_a_fleet_under_load(fleet: Fleet, random_pair: tuple[Path, Path]) -> None:
    address = fleet.processes["orchestrator 127.0.0.1"].address
    async with grpc.aio.insecure_channel(address) as channel:
        load = Load(orchestrator_pb2_grpc.OrchestratorServiceStub(channel))
        async with load.running():
            held = {role: [0, 0] for role in ("target", "drafter")}
            for _ in range(150):
                await load.more(1)
                for role, sums in held.items():
                    for index, host in enumerate(HOSTS):
                        sums[index] += await fleet.held(role, host)
            for role, sums in held.items():
                # What is shared out is load. Whoever has the faster core makes more texts of it.
                assert max(sums) <= 1.2 * min(sums), (role, sums)
                counts = [await fleet.opened(role, host) for host in HOSTS]
                assert max(counts) <= 2 * min(counts), (role, counts)

            # One that joins takes work; one with another model does not.
            fleet.start("target", "127.0.0.4")
            fleet.start("target", "127.0.0.5", model=str(random_pair[0]))
            await fleet.ready("target", "127.0.0.5")
            await fleet.ready("target", "127.0.0.4")
            assert await load.until(lambda: _works(fleet, "127.0.0.4")) < JOIN_SECONDS
            before = await fleet.opened("target", "127.0.0.2")
            await load.more(60)
            assert await fleet.opened("target", "127.0.0.4") >= 10
            assert await fleet.opened("target", "127.0.0.2") > before
            assert await fleet.opened("target", "127.0.0.5") == 0

            # One that leaves finishes what it has; its name may have it for a while.
            for role in ("target", "drafter"):
                leaving = fleet.processes[f"{role} 127.0.0.2"]
                leaving.terminate()
                await load.more(20)
                fleet.names.records[f"{role}s.test"].remove("127.0.0.2")
                await load.more(20)
                assert leaving.wait(30) == 0
        assert load.drafted >= load.texts - CLIENTS  # those that the leaving drafter had


async def _works(fleet: Fleet, host: str) -> bool:
    return await fleet.opened("target", host) > 0

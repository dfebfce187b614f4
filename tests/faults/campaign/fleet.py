"""An orchestrator over several drafters and targets, each a process behind a proxy."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.drafter.v1 import drafter_pb2, drafter_pb2_grpc
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.rpc.channel import connect
from tandem.target.v1 import target_pb2, target_pb2_grpc
from tests.faults.campaign.proxy import Proxy, proxied
from tests.support.processes.fork_server import Forked
from tests.support.processes.ports import free_port

READY_SECONDS = 120.0
# Of the settings of a fleet: tiny models gain nothing from threads.
_SETTINGS = {"LOG_FORMAT": "json", "THREADS": "1", "ENGINE": "torch", "DTYPE": "float32"}
ROLES = ("drafter", "target")


class Pod:
    """A service that is started again and again, behind one proxy.

    Attributes:
        role: "drafter", "target" or "orchestrator".
        log: gets what it says.
        proxy: that the orchestrator sees; None of an orchestrator.
    """

    def __init__(
        self, role: str, settings: Mapping[str, str], log: Path, proxy: Any = None
    ) -> None:
        self.role = role
        self.proxy: Proxy | None = proxy
        self.address = ""
        self._process: Forked | None = None
        self._settings = settings
        self.log = log

    def start(self) -> None:
        """Start a process at a fresh port; the proxy leads to it."""
        # An orchestrator keeps its address: its clients come back to it.
        if not self.address or self.proxy is not None:
            self.address = f"127.0.0.1:{free_port()}"
        module = "orchestrator" if self.role == "orchestrator" else f"{self.role}_svc"
        own = {**self._settings, "LISTEN": self.address}
        environment = {f"TANDEM_{self.role.upper()}_{name}": value for name, value in own.items()}
        with self.log.open("ab") as log:
            env = {**os.environ, **environment}
            self._process = Forked([module], env, stdout=log.fileno())
        if self.proxy is not None:
            self.proxy.upstream = self.address

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to its process."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End its process, if it runs."""
        if self._process is not None:
            self._process.kill()

    @property
    def pid(self) -> int:
        """Of its process."""
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Of its process; None while it runs."""
        assert self._process is not None
        return self._process.poll()

    async def ended(self, seconds: float = 60.0) -> int:
        """Wait for its process's exit code."""
        async with asyncio.timeout(seconds):
            while (code := self.exit_code) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return code

    async def ready(self) -> None:
        """Wait until it says that it serves."""
        name = f"tandem.{self.role}.v1.{self.role.capitalize()}Service"
        async with asyncio.timeout(READY_SECONDS), grpc.aio.insecure_channel(self.address) as line:
            health: Any = health_pb2_grpc.HealthStub(line)
            asked = health_pb2.HealthCheckRequest(service=name)
            while True:
                try:
                    reply = await health.Check(asked, timeout=5, wait_for_ready=True)
                except grpc.aio.AioRpcError:
                    continue
                if reply.status == health_pb2.HealthCheckResponse.SERVING:
                    return
                await asyncio.sleep(0.02)

    async def open_sequences(self) -> int:
        """That it holds now."""
        kind, stub = (
            (target_pb2, target_pb2_grpc.TargetServiceStub)
            if self.role == "target"
            else (drafter_pb2, drafter_pb2_grpc.DrafterServiceStub)
        )
        async with grpc.aio.insecure_channel(self.address) as channel:
            asked: Any = stub(channel)
            reply = await asked.GetModelInfo(kind.GetModelInfoRequest(), timeout=10)
        return int(reply.stats.open_sequences)


class Fleet:
    """All of them.

    Attributes:
        pods: drafters and targets, by role.
        orchestrators: over their proxies.
        stub: of the public calls, of all orchestrators in turn.
    """

    def __init__(self, pods: dict[str, list[Pod]], orchestrators: list[Pod], stub: Any) -> None:
        self.pods = pods
        self.orchestrators = orchestrators
        self.stub = stub

    async def leaked(self, seconds: float = 5.0) -> int:
        """Sequences that are still open some time after the last text; all are to live."""
        pods = [pod for role in ROLES for pod in self.pods[role]]
        for pod in (*pods, *self.orchestrators):
            assert pod.exit_code is None, f"a {pod.role} has ended with {pod.exit_code}: {pod.log}"
        until = time.monotonic() + seconds
        while True:
            held = sum([await pod.open_sequences() for pod in pods])
            if not held or time.monotonic() > until:
                return held
            await asyncio.sleep(0.05)


@asynccontextmanager
async def fleet_of(
    models: Mapping[str, Path],
    logs: Path,
    each: int = 2,
    fronts: int = 1,
    pods_have: Mapping[str, str] | None = None,
    **settings: str,
) -> AsyncIterator[Fleet]:
    """Drafters and targets, so many of each, and orchestrators that are ready.

    Args:
        models: checkpoints by role.
        logs: gets each service's log.
        each: how many of a role.
        fronts: how many orchestrators.
        pods_have: settings of drafters and targets, without their prefix.
        settings: of orchestrators.
    """
    async with AsyncExitStack() as stack:
        pods: dict[str, list[Pod]] = {role: [] for role in ROLES}
        for role in ROLES:
            for number in range(each):
                proxy = await stack.enter_async_context(proxied(role, ""))
                own = {**_SETTINGS, "MODEL": str(models[role]), **(pods_have or {})}
                pod = Pod(role, own, logs / f"{role}-{number}.log", proxy)
                stack.callback(pod.kill)
                await asyncio.to_thread(pod.start)
                pods[role].append(pod)
        for role in ROLES:
            await asyncio.gather(*(pod.ready() for pod in pods[role]))
        places = {
            f"{role.upper()}S": ",".join(pod.proxy.address for pod in pods[role] if pod.proxy)
            for role in ROLES
        }
        chosen = {"LOG_FORMAT": "json", "GAMMA": "4", **places, **settings}
        orchestrators = [
            Pod("orchestrator", chosen, logs / f"orchestrator-{number}.log")
            for number in range(fronts)
        ]
        for front in orchestrators:
            stack.callback(front.kill)
            await asyncio.to_thread(front.start)
        await asyncio.gather(*(front.ready() for front in orchestrators))
        addresses = ",".join(front.address for front in orchestrators)
        channel = await stack.enter_async_context(connect(f"ipv4:{addresses}"))
        yield Fleet(pods, orchestrators, orchestrator_pb2_grpc.OrchestratorServiceStub(channel))

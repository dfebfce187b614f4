"""Real processes of the three services, for tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.drafter.v1 import drafter_pb2, drafter_pb2_grpc
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.target.v1 import target_pb2, target_pb2_grpc

ROOT = Path(__file__).parent.parent
READY_SECONDS = 120


@dataclass
class Process:
    """A service in a process of its own, on a port that it chose."""

    module: str
    environment: Mapping[str, str]
    log: Path
    popen: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        command = [sys.executable, "-m", self.module]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **self.environment}
        with self.log.open("wb") as log:
            self.popen = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, cwd=ROOT
            )

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._logged('listening')['port']}"

    def wait_ready(self) -> None:
        self._logged("ready")

    def _logged(self, event: str) -> dict[str, Any]:
        """The first log line of an event."""
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            for line in self.log.read_text().splitlines():
                if line.startswith("{") and (entry := json.loads(line))["event"] == event:
                    return dict(entry)
            if self.popen.poll() is not None:
                raise AssertionError(f"{self.module} exited:\n{self.log.read_text()}")
            time.sleep(0.02)
        raise AssertionError(f"{self.module} never logged {event}:\n{self.log.read_text()}")

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(timeout=30)

    def again(self) -> Process:
        """The same service anew, on the same port, once this one has ended."""
        listen = next(name for name in self.environment if name.endswith("_LISTEN"))
        log = self.log.with_name(f"again-{self.log.name}")
        return Process(self.module, {**self.environment, listen: self.address}, log)

    def kill(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
            self.popen.wait()


@dataclass
class Trio:
    """The three services as processes."""

    drafter: Process
    target: Process
    orchestrator: Process

    @property
    def processes(self) -> list[Process]:
        return [self.orchestrator, self.drafter, self.target]

    def restart(self, name: str) -> None:
        """Start a service that has ended again, and wait until a text can be had."""
        setattr(self, name, getattr(self, name).again())
        getattr(self, name).wait_ready()
        deadline = time.monotonic() + READY_SECONDS
        # The orchestrator's channel to a peer that was away is waiting to try again.
        while not self._serves():
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def _serves(self) -> bool:
        """Whether a text can be had, and is drafted."""
        request = pb.CompleteRequest(generation=generation([1], max_new_tokens=8, gamma=2))
        with self.client() as stub:
            try:
                return not stub.Complete(request, wait_for_ready=True).summary.drafter_lost
            except grpc.RpcError:
                return False

    def stats(self) -> tuple[drafter_pb2.GetModelInfoResponse, target_pb2.GetModelInfoResponse]:
        """What both services say of themselves."""
        with (
            grpc.insecure_channel(self.drafter.address) as drafter,
            grpc.insecure_channel(self.target.address) as target,
        ):
            return (
                drafter_pb2_grpc.DrafterServiceStub(drafter).GetModelInfo(
                    drafter_pb2.GetModelInfoRequest()
                ),
                target_pb2_grpc.TargetServiceStub(target).GetModelInfo(
                    target_pb2.GetModelInfoRequest()
                ),
            )

    def open_sequences(self) -> int:
        """Open sequences of both services together."""
        return sum(info.stats.open_sequences for info in self.stats())

    def wait_idle(self, seconds: float = 1.0) -> None:
        """Both services are back to zero open sequences in time."""
        deadline = time.monotonic() + seconds
        while (count := self.open_sequences()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert count == 0, f"{count} sequences still open after {seconds} s"

    @contextmanager
    def client(self) -> Iterator[orchestrator_pb2_grpc.OrchestratorServiceStub]:
        with grpc.insecure_channel(self.orchestrator.address) as channel:
            yield orchestrator_pb2_grpc.OrchestratorServiceStub(channel)


@contextmanager
def trio(
    logs: Path,
    *,
    drafter: Mapping[str, str] | None = None,
    target: Mapping[str, str] | None = None,
    orchestrator: Mapping[str, str] | None = None,
    target_module: str = "target_svc",
) -> Iterator[Trio]:
    """Start drafter, target and orchestrator, wait until they are ready, end them.

    Settings are given without their prefixes.
    """
    started: list[Process] = []

    def start(module: str, prefix: str, settings: Mapping[str, str]) -> Process:
        environment = {f"TANDEM_{prefix}_{name}": value for name, value in settings.items()}
        environment[f"TANDEM_{prefix}_LISTEN"] = "127.0.0.1:0"
        environment[f"TANDEM_{prefix}_LOG_FORMAT"] = "json"
        # A core for each model: they share two with everything else.
        environment.setdefault(f"TANDEM_{prefix}_THREADS", "1")
        started.append(Process(module, environment, logs / f"{prefix.lower()}.log"))
        return started[-1]

    try:
        drafting = start("drafter_svc", "DRAFTER", drafter or {})
        targeting = start(target_module, "TARGET", target or {})
        addresses = {"DRAFTERS": drafting.address, "TARGETS": targeting.address}
        orchestrating = start("orchestrator", "ORCHESTRATOR", {**addresses, **(orchestrator or {})})
        for process in started:
            process.wait_ready()
        services = Trio(drafting, targeting, orchestrating)
        yield services
        started += services.processes
    finally:
        for process in started:
            process.kill()


def generation(
    prompt: list[int] | str,
    *,
    max_new_tokens: int,
    seed: int | None = None,
    gamma: int | None = None,
    verifier: str | None = None,
    temperature: float | None = None,
) -> pb.Generation:
    """A request's message."""
    message = pb.Generation(
        speculation=pb.Speculation(verifier=verifier, gamma=gamma),
        stopping=pb.Stopping(max_new_tokens=max_new_tokens),
    )
    if isinstance(prompt, str):
        message.prompt = prompt
    else:
        message.prompt_token_ids.extend(prompt)
    if seed is not None:
        message.sampling.seed = seed
    if temperature is not None:
        message.sampling.temperature = temperature
    return message


def is_serving(address: str, service: str) -> bool:
    """What grpc.health.v1 says of a service."""
    with grpc.insecure_channel(address) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service=service)
        )
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

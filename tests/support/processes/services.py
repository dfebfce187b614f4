"""Real processes of the three services, for tests."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.drafter.v1 import drafter_pb2, drafter_pb2_grpc
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.target.v1 import target_pb2, target_pb2_grpc
from tandem.tools.local.process import ServiceProcess
from tandem.tools.local.stack import Stack, StackSettings, running
from tests.support.processes.fork_server import Forked
from tests.support.waiting import wait_until

# One thread for each model: they share two cores with everything else.
_MODELS = {name: {"THREADS": "1"} for name in ("drafter", "target")}
READY_SECONDS = 300  # on a busy machine


class Trio:
    """The three services as processes.

    Args:
        stack: that runs them.
    """

    def __init__(self, stack: Stack) -> None:
        self.stack = stack

    @property
    def drafter(self) -> ServiceProcess:
        return self.stack.processes["drafter"]

    @property
    def target(self) -> ServiceProcess:
        return self.stack.processes["target"]

    @property
    def orchestrator(self) -> ServiceProcess:
        return self.stack.processes["orchestrator"]

    @property
    def processes(self) -> list[ServiceProcess]:
        return [self.orchestrator, self.drafter, self.target]

    def restart(self, name: str) -> None:
        """Start an ended service again, and wait until texts are generated and drafted."""
        self.stack.restart(name)
        deadline = time.monotonic() + READY_SECONDS
        # The orchestrator's channel to the lost peer waits before it connects again.
        while not self._serves():
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def _serves(self) -> bool:
        """Whether a text is generated, with a drafter."""
        request = pb.CompleteRequest(generation=generation([1], max_new_tokens=8, gamma=2))
        with self.client() as stub:
            try:
                return not stub.Complete(request, wait_for_ready=True).summary.drafter_lost
            except grpc.RpcError:
                return False

    def stats(self) -> tuple[drafter_pb2.GetModelInfoResponse, target_pb2.GetModelInfoResponse]:
        """The model info of drafter and target."""
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

    def wait_open(self, count: int) -> None:
        """Wait until this many sequences are open, in drafter and target together."""
        wait_until(lambda: self.open_sequences() == count)

    def wait_idle(self) -> None:
        """Wait until no sequence is open."""
        self.wait_open(0)

    def channel(self, name: str) -> grpc.Channel:
        """To a service, by its name."""
        return grpc.insecure_channel(self.stack.processes[name].address)

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
    inside: bool = False,
    start: Any = Forked,
) -> Iterator[Trio]:
    """Start drafter, target and orchestrator, wait until they are ready, and stop them at the end.

    Settings are given without their prefixes. With `inside` no drafter is started: the target
    drafts by the drafter's settings. `start` is a class of processes; the usual one forks, which is
    fast.
    """
    own = {"drafter": drafter, "target": target, "orchestrator": orchestrator}
    services = {
        name: {"LISTEN": "127.0.0.1:0", **_MODELS.get(name, {}), **(settings or {})}
        for name, settings in own.items()
    }
    settings = StackSettings(
        services, logs, modules={"target": target_module}, start=start, inside=inside
    )
    with running(settings) as stack:
        yield Trio(stack)


def generation(
    prompt: list[int] | str,
    *,
    max_new_tokens: int,
    seed: int | None = None,
    gamma: int | None = None,
    verifier: str | None = None,
    temperature: float | None = None,
    max_nodes: int | None = None,
) -> pb.Generation:
    """The message of a request."""
    message = pb.Generation(
        speculation=pb.Speculation(verifier=verifier, gamma=gamma, max_nodes=max_nodes),
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
    """Whether grpc.health.v1 reports a service as SERVING."""
    with grpc.insecure_channel(address) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service=service)
        )
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

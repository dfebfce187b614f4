"""The three services as processes: started, waited for, watched, drained."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.failure import Failure, Misconfigured
from tandem.local.process import ServiceProcess
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc

_POLL_SECONDS = 0.1
_CALL_SECONDS = 2.0
# A ready pair that the orchestrator still refuses after this long does not fit.
_FIT_SECONDS = 5.0
# What a service may take beside its drain: stopping its engine, writing its last spans.
_MARGIN_SECONDS = 10.0
_KILL_SECONDS = 2.0
# The environment comes before these: it is the user's.
_DEFAULTS = {"LISTEN": "127.0.0.1:0", "DRAIN_SECONDS": "30", "LOG_LEVEL": "info"}
_TELLING_LEVELS = ("info", "debug")

_MODULES = {"drafter": "drafter_svc", "target": "target_svc", "orchestrator": "orchestrator"}
_HEALTH_NAMES = {
    "drafter": "tandem.drafter.v1.DrafterService",
    "target": "tandem.target.v1.TargetService",
    "orchestrator": "tandem.orchestrator.v1.OrchestratorService",
}


class Interrupted(Exception):
    """We were asked to stop before all was ready."""


@dataclass(frozen=True)
class StackSettings:
    """What to start.

    Attributes:
        services: settings by service, named as in the environment but for the prefix; they
            win over the environment's. Without "drafter" the stack decodes plainly.
        log_dir: gets each service's log, if given.
        echo: is called with every log line, if given.
    """

    services: Mapping[str, Mapping[str, str]]
    log_dir: Path | None = None
    echo: Callable[[str], None] | None = None


class Stack:
    """Drafter, target and orchestrator."""

    def __init__(self, settings: StackSettings) -> None:
        self._settings = settings
        self._processes: dict[str, ServiceProcess] = {}

    @property
    def addresses(self) -> dict[str, str]:
        """Where each service is reached."""
        return {name: process.address for name, process in self._processes.items()}

    @property
    def process_ids(self) -> dict[str, int]:
        """Each service's process."""
        return {name: process.process_id for name, process in self._processes.items()}

    def start(self, stopping: Event, progress: Callable[[str], None]) -> None:
        """Start all and return when all are ready.

        Args:
            stopping: gives up when set.
            progress: is told what is waited for.

        Raises:
            Failure: a service cannot start, or the pair does not fit.
            Interrupted: `stopping` was set.
        """
        _require_free(self._settings_of("orchestrator")["LISTEN"])
        models = [name for name in ("drafter", "target") if name in self._settings.services]
        for name in models:
            self._launch(name)
        progress("starting the models' processes")
        self._wait(stopping, lambda: all(self._processes[name].port for name in models))
        peers = {
            f"{name.upper()}S": self._processes[name].address if name in models else ""
            for name in ("drafter", "target")
        }
        self._launch("orchestrator", **peers)
        for name in models:
            progress(f"loading the {name}'s model")
            self._wait(stopping, lambda name=name: self._is_ready(name))  # type: ignore[misc]
        progress("matching the pair")
        self._wait(stopping, lambda: self._processes["orchestrator"].port is not None)
        fit_by = time.monotonic() + _FIT_SECONDS
        self._wait(stopping, lambda: self._is_matched(fit_by))

    def _settings_of(self, name: str) -> dict[str, str]:
        """What was asked for, else what the environment says, else our own defaults.

        Raises:
            Misconfigured: we could not run a service that is set so.
        """
        prefix = f"TANDEM_{name.upper()}_"
        inherited = {
            variable.removeprefix(prefix): value
            for variable, value in os.environ.items()
            if variable.startswith(prefix)
        }
        chosen = {**_DEFAULTS, **inherited, **self._settings.services.get(name, {})}
        if chosen["LOG_LEVEL"] not in _TELLING_LEVELS:
            raise Misconfigured(
                f"{prefix}LOG_LEVEL: the ports are read from the services' logs;"
                f" use {' or '.join(_TELLING_LEVELS)}"
            )
        return {**chosen, "LOG_FORMAT": "json"}

    def _launch(self, name: str, **peers: str) -> None:
        chosen = {**self._settings_of(name), **peers}
        folder = self._settings.log_dir
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self._processes[name] = ServiceProcess(
            name,
            _MODULES[name],
            chosen["LISTEN"].rpartition(":")[0],
            {f"TANDEM_{name.upper()}_{key}": value for key, value in chosen.items()},
            folder / f"{name}.log" if folder else None,
            self._settings.echo,
        )

    def _wait(self, stopping: Event, condition: Callable[[], bool]) -> None:
        """Wait for a condition while all services live."""
        while not condition():
            self.require_alive()
            if stopping.wait(_POLL_SECONDS):
                raise Interrupted

    def _is_ready(self, name: str) -> bool:
        with grpc.insecure_channel(self._processes[name].address) as channel:
            request = health_pb2.HealthCheckRequest(service=_HEALTH_NAMES[name])
            try:
                reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=_CALL_SECONDS)
            except grpc.RpcError:
                return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    def _is_matched(self, fit_by: float) -> bool:
        """Whether the orchestrator takes the pair.

        Raises:
            Misconfigured: it does not, and says why.
        """
        if self._is_ready("orchestrator"):
            return True
        if time.monotonic() < fit_by:
            return False
        with grpc.insecure_channel(self._processes["orchestrator"].address) as channel:
            stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
            try:
                stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=_CALL_SECONDS)
            except grpc.RpcError as error:
                reason = error.details() if isinstance(error, grpc.Call) else str(error)
                raise Misconfigured(f"orchestrator: {reason}") from None
        return False

    def require_alive(self) -> None:
        """Check that no service has ended.

        Raises:
            Failure: which one has, and the end of its log.
        """
        for process in self._processes.values():
            code = process.exit_code
            if code is None:
                continue
            lines = process.last_lines()
            # With this code a service leaves one line that says it all.
            if code == 2 and lines:
                raise Misconfigured(lines[-1])
            raise Failure(f"the {process.name} {process.ending()}", lines)

    def drain(self) -> dict[str, int]:
        """End all in order, the orchestrator first, so that running texts can finish.

        Returns:
            Exit codes.
        """
        codes = {}
        orchestrator = self._processes.get("orchestrator")
        if orchestrator is not None:
            orchestrator.terminate()
            codes["orchestrator"] = orchestrator.wait(self._drain_seconds("orchestrator"))
        for process in self._processes.values():
            process.terminate()
        for name, process in self._processes.items():
            codes[name] = process.wait(self._drain_seconds(name))
        return codes

    def _drain_seconds(self, name: str) -> float:
        """The most that a service takes to end, which has read the same value and found it good."""
        return float(self._settings_of(name)["DRAIN_SECONDS"]) + _MARGIN_SECONDS

    def kill(self) -> None:
        """End all at once; a service that is loading its model does not hear SIGTERM."""
        for process in self._processes.values():
            process.terminate()
        deadline = time.monotonic() + _KILL_SECONDS
        for process in self._processes.values():
            process.wait(max(deadline - time.monotonic(), 0.0))


def _require_free(listen: str) -> None:
    """Find out in time that we cannot listen somewhere: models can take minutes to load.

    Raises:
        Misconfigured: the address is taken or not ours.
    """
    host, _, port = listen.rpartition(":")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            # As gRPC does: a port that was just given up counts as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host.strip("[]"), int(port)))
    except (OSError, ValueError, OverflowError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise Misconfigured(
            f"cannot listen on {listen}: {reason}; choose another HOST:PORT with --listen"
        ) from None

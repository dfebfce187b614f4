"""The three services as processes: start, wait until ready, watch, drain."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

from tandem.failure import Failure, Misconfigured
from tandem.rpc.endpoint import Endpoint
from tandem.tools.local.endpoints import endpoint_of, require_free
from tandem.tools.local.pair import difference_of
from tandem.tools.local.process import ServiceProcess
from tandem.tools.local.readiness import is_improving, is_ready, refusal

_POLL_SECONDS = 0.1
# A ready pair that the orchestrator still refuses after this long does not fit.
_FIT_SECONDS = 5.0
# Time to end besides the drain: stopping the engine, writing the last spans.
_MARGIN_SECONDS = 10.0
_KILL_SECONDS = 2.0
# A model of 90 M parameters takes some ten seconds on a slow machine.
_SETTLE_SECONDS = 120.0
# The environment overrides these: it is the user's.
_DEFAULTS = {"LISTEN": "127.0.0.1:0", "DRAIN_SECONDS": "30", "LOG_LEVEL": "info"}
_TELLING_LEVELS = ("info", "debug")

_MODELS = ("drafter", "target")
_MODULES = {"drafter": "drafter_svc", "target": "target_svc", "orchestrator": "orchestrator"}


class Interrupted(Exception):
    """We were asked to stop before all was ready."""


@dataclass(frozen=True)
class StackSettings:
    """What to start.

    Attributes:
        services: settings by service, named as in the environment without the prefix; they
            override the environment. Without "drafter" the stack decodes plainly. An
            orchestrator that is the only service needs its DRAFTERS and TARGETS here.
        log_dir: folder for each service's log, if given.
        echo: is called with every log line, if given.
        modules: by service, modules to run instead of its own.
        root: of another checkout, whose services then run.
        start: starts a process, as `subprocess.Popen` does.
        inside: the target drafts: it gets the drafter's settings, and no drafter is started.
    """

    services: Mapping[str, Mapping[str, str]]
    log_dir: Path | None = None
    echo: Callable[[str], None] | None = None
    modules: Mapping[str, str] = field(default_factory=dict)
    root: Path | None = None
    start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen
    inside: bool = False


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
    def processes(self) -> Mapping[str, ServiceProcess]:
        """Each service's process."""
        return self._processes

    def further_addresses(self, setting: str) -> dict[str, str]:
        """Where services are reached on ports that they have besides, by the setting of these."""
        found = {}
        for name, process in self._processes.items():
            if setting in process.further_ports:
                host = self._settings_of(name)[setting].rpartition(":")[0]
                found[name] = f"{host}:{process.further_ports[setting]}"
        return found

    def endpoint(self, name: str) -> Endpoint:
        """Where and how to reach a service."""
        settings, orchestrator = self._settings_of(name), self._settings_of("orchestrator")
        return endpoint_of(name, self._processes[name].address, settings, orchestrator)

    def start(
        self,
        stopping: Event | None = None,
        progress: Callable[[str], None] = lambda waited_for: None,
    ) -> None:
        """Start all and return when all are ready.

        Args:
            stopping: gives up when set, if given.
            progress: is told what is waited for.

        Raises:
            Failure: a service cannot start, or the pair does not fit.
            Interrupted: `stopping` was set.
        """
        stopping = stopping or Event()
        require_free(self._settings_of("orchestrator")["LISTEN"])
        models = [name for name in _MODELS if name in self._settings.services]
        if self._settings.inside:
            models.remove("drafter")
        for name in models:
            self._launch(name)
        progress("starting the models' processes")
        self._wait(stopping, lambda: all(self._processes[name].port for name in models))
        self._launch("orchestrator")
        for name in models:
            progress(f"loading the {name}'s model")
            self._wait(stopping, lambda name=name: self._is_ready(name))  # type: ignore[misc]
        progress("matching the pair")
        self._wait(stopping, lambda: self._processes["orchestrator"].port is not None)
        fit_by = time.monotonic() + _FIT_SECONDS
        self._wait(stopping, lambda: self._is_matched(fit_by))

    def settle(self, stopping: Event | None = None) -> None:
        """Return when no service searches for a faster back end any more: speeds measured from
        then on stay valid. Gives up after two minutes.

        Raises:
            Failure: a service has ended.
            Interrupted: `stopping` was set.
        """
        settled_by = time.monotonic() + _SETTLE_SECONDS
        for name in _MODELS:
            if name in self._processes:
                self._wait(
                    stopping or Event(),
                    lambda name=name: (  # type: ignore[misc]
                        time.monotonic() > settled_by or not is_improving(name, self.endpoint(name))
                    ),
                )

    def restart(self, name: str) -> None:
        """Start an ended service again, on its old port; return when it is ready.

        Raises:
            Failure: a service has ended.
        """
        ended = self._processes[name]
        ended.kill()  # its pipes are closed
        host = self._settings_of(name)["LISTEN"].rpartition(":")[0]
        self._launch(name, f"{host}:{ended.port}")
        self._wait(Event(), lambda: self._is_ready(name))

    def _settings_of(self, name: str) -> dict[str, str]:
        """The given settings, else the environment's, else our own defaults.

        Raises:
            Misconfigured: LOG_LEVEL hides the log lines that we read.
        """
        prefix = f"TANDEM_{name.upper()}_"
        inherited = {
            variable.removeprefix(prefix): value
            for variable, value in os.environ.items()
            if variable.startswith(prefix)
        }
        peers = self._peers() if name == "orchestrator" else {}
        chosen = {**_DEFAULTS, **inherited, **peers, **self._settings.services.get(name, {})}
        if chosen["LOG_LEVEL"] not in _TELLING_LEVELS:
            raise Misconfigured(
                f"{prefix}LOG_LEVEL: the ports are read from the services' logs;"
                f" use {' or '.join(_TELLING_LEVELS)}"
            )
        return {**chosen, "LOG_FORMAT": "json"}

    def _peers(self) -> dict[str, str]:
        """Where an orchestrator finds the other services of this stack."""
        return {
            f"{name.upper()}S": self._processes[name].address if name in self._processes else ""
            for name in _MODELS
        }

    def _launch(self, name: str, listen: str | None = None) -> None:
        chosen = self._settings_of(name)
        chosen["LISTEN"] = listen or chosen["LISTEN"]
        environment = {f"TANDEM_{name.upper()}_{key}": value for key, value in chosen.items()}
        if name == "target" and self._settings.inside:
            drafter = self._settings.services["drafter"]
            environment |= {f"TANDEM_DRAFTER_{key}": value for key, value in drafter.items()}
        self._processes[name] = ServiceProcess(
            name=name,
            module=self._settings.modules.get(name, _MODULES[name]),
            host=chosen["LISTEN"].rpartition(":")[0],
            environment=environment,
            log_file=self._log_of(name),
            echo=self._settings.echo,
            root=self._settings.root,
            start=self._settings.start,
        )

    def _log_of(self, name: str) -> Path | None:
        """A service's log file; at its first start the file of an earlier stack is removed."""
        if self._settings.log_dir is None:
            return None
        self._settings.log_dir.mkdir(parents=True, exist_ok=True)
        path = self._settings.log_dir / f"{name}.log"
        if name not in self._processes:
            path.unlink(missing_ok=True)
        return path

    def _wait(self, stopping: Event, condition: Callable[[], bool]) -> None:
        """Wait for a condition while all services live."""
        while not condition():
            self.require_alive()
            if stopping.wait(_POLL_SECONDS):
                raise Interrupted

    def _is_ready(self, name: str) -> bool:
        process = self._processes[name]
        return process.port is not None and is_ready(name, self.endpoint(name))

    def _is_matched(self, fit_by: float) -> bool:
        """Whether the orchestrator accepts the pair.

        Raises:
            Misconfigured: it refuses the pair, with its reason.
        """
        if self._is_ready("orchestrator"):
            return True
        if time.monotonic() < fit_by:
            return False
        if reason := refusal(self.endpoint("orchestrator")):
            raise Misconfigured(f"orchestrator: {reason}{self._tokenizers()}")
        return False

    def _tokenizers(self) -> str:
        """How those of the pair differ, as the end of a sentence; empty where they do not."""
        services = self._settings.services
        found = difference_of([services.get(name, {}).get("MODEL", "") for name in _MODELS])
        return f" ({found}; the first is the drafter's)" if found else ""

    def require_alive(self) -> None:
        """Check that no service has ended.

        Raises:
            Failure: a service has ended; with its name and the end of its log.
        """
        for process in self._processes.values():
            code = process.exit_code
            if code is None:
                continue
            lines = process.last_lines()
            # A service that exits with this code has logged one line that says why.
            if code == 2 and lines:
                raise Misconfigured(lines[-1])
            raise Failure(f"the {process.name} {process.ending()}", lines)

    def drain(self) -> dict[str, int]:
        """Stop all in order, the orchestrator first, so that running texts can finish.

        Returns:
            Exit codes.
        """
        codes = {}
        orchestrator = self._processes.get("orchestrator")
        if orchestrator is not None:
            codes["orchestrator"] = orchestrator.stop(self._drain_seconds("orchestrator"))
        for process in self._processes.values():
            process.terminate()
        for name, process in self._processes.items():
            codes[name] = process.wait(self._drain_seconds(name))
        return codes

    def _drain_seconds(self, name: str) -> float:
        """Most seconds that a service takes to end. The service has validated the same setting."""
        return float(self._settings_of(name)["DRAIN_SECONDS"]) + _MARGIN_SECONDS

    def kill(self) -> None:
        """End all quickly, by SIGKILL if need be: while loading a model, SIGTERM has no effect."""
        for process in self._processes.values():
            process.terminate()
        deadline = time.monotonic() + _KILL_SECONDS
        for process in self._processes.values():
            process.wait(max(deadline - time.monotonic(), 0.0))


@contextmanager
def running(settings: StackSettings) -> Iterator[Stack]:
    """A stack that is ready and has settled. It is drained at the end, or killed after an error.

    Raises:
        Failure: a service cannot start, or the pair does not fit.
    """
    stack = Stack(settings)
    try:
        stack.start()
        stack.settle()
        yield stack
        stack.drain()
    finally:
        stack.kill()

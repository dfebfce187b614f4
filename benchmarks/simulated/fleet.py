"""Several targets and drafters on simulated devices, behind one orchestrator."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.simulated.device import PASS_VARIABLE, ROW_VARIABLE
from tandem.failure import Failure
from tandem.rpc.endpoint import Endpoint
from tandem.tools.local.process import ROOT, ServiceProcess
from tandem.tools.local.readiness import is_ready
from tandem.tools.local.stack import Stack, StackSettings, running

_READY_SECONDS = 120.0
_DRAIN_SECONDS = 10.0


@dataclass(frozen=True)
class Device:
    """What a pass takes, milliseconds.

    Attributes:
        a_pass: in any case.
        a_row: for each new token beside.
    """

    a_pass: float
    a_row: float


@contextmanager
def fleet(
    models: Mapping[str, Path],
    devices: Mapping[str, Device],
    replicas: Mapping[str, int],
    traces: Path | None = None,
    settings: Mapping[str, Mapping[str, str]] | None = None,
) -> Iterator[Stack]:
    """Start the replicas and an orchestrator, and end them.

    Args:
        models: checkpoint of "target" and "drafter".
        devices: of each.
        replicas: of each.
        traces: folder for spans, if given.
        settings: more of a service, by its name, without their prefix.

    Yields:
        The orchestrator.

    Raises:
        Failure: one cannot start.
    """
    more = settings or {}
    with ExitStack() as ends:
        started = {
            name: [
                _start(name, number, models[name], devices[name], traces, more.get(name, {}), ends)
                for number in range(replicas[name])
            ]
            for name in ("target", "drafter")
        }
        orchestrator = {
            "LISTEN": "127.0.0.1:0",
            **{
                f"{name.upper()}S": ",".join(process.address for process in processes)
                for name, processes in started.items()
            },
            **more.get("orchestrator", {}),
        }
        if traces is not None:
            orchestrator["TRACE_FILE"] = str(traces / "orchestrator.jsonl")
        for name, processes in started.items():
            for process in processes:
                _wait(partial(is_ready, name, Endpoint(process.address)), process)
        with running(StackSettings({"orchestrator": orchestrator}, root=ROOT)) as stack:
            yield stack


def _start(
    name: str,
    number: int,
    model: Path,
    device: Device,
    traces: Path | None,
    more: Mapping[str, str],
    ends: ExitStack,
) -> ServiceProcess:
    """A replica, once it listens."""
    settings = {
        "LISTEN": "127.0.0.1:0",
        "MODEL": str(model),
        "MAX_LENGTH": "512",
        "THREADS": "1",
        # Another engine would take over in the middle of a run.
        "ENGINE": "torch",
        "DRAIN_SECONDS": "2",
        "LOG_FORMAT": "json",
        **more,
    }
    if traces is not None:
        settings["TRACE_FILE"] = str(traces / f"{name}-{number}.jsonl")
    environment = {f"TANDEM_{name.upper()}_{key}": value for key, value in settings.items()}
    environment |= {PASS_VARIABLE: f"{device.a_pass}", ROW_VARIABLE: f"{device.a_row}"}
    module = f"benchmarks.simulated.{name}"
    process = ServiceProcess(name, module, "127.0.0.1", environment, root=ROOT)
    ends.callback(process.stop, _DRAIN_SECONDS)
    _wait(lambda: process.port is not None, process)
    return process


def _wait(condition: Callable[[], bool], process: ServiceProcess) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while not condition():
        if process.exit_code is not None or time.monotonic() > deadline:
            raise Failure(f"a {process.name} did not start", process.last_lines())
        time.sleep(0.05)

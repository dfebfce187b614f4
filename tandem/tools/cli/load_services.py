"""What `tandem load` loads: running services, or our own, started for the load."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tandem.failure import Failure, Misconfigured
from tandem.tools.cli.display.terminal import tell
from tandem.tools.cli.metrics_addresses import endpoints_of

_SERVICES = ("orchestrator", "drafter", "target")
_LOOPBACK = ("127.0.0.1", "localhost")
_CONNECT_SECONDS = 2.0


@contextmanager
def services(
    address: str, metrics: Sequence[str] | None, must_measure: bool, log_dir: Path
) -> Iterator[tuple[list[str], bool]]:
    """Yield the services' metrics endpoints, and whether the services are ours.

    If no orchestrator answers, the embedded pair is started for the time of the context.

    Args:
        address: of the orchestrator.
        metrics: endpoints of running services; by default those of the environment.
        must_measure: whether a load cannot be judged without metrics.
        log_dir: gets the logs of our own services.

    Raises:
        Failure: no orchestrator answers, and the address is not of this machine or `metrics` is
            given; or our own services cannot start.
        Misconfigured: metrics are needed and none are named, or an endpoint is not HOST:PORT.
    """
    from tandem.tools.local.pair import Pair
    from tandem.tools.local.stack import StackSettings, running

    host, _, port = address.rpartition(":")
    if _answers(host, port):
        try:
            endpoints = endpoints_of(metrics)
        except Misconfigured:
            if metrics or must_measure:
                raise
            tell("no metrics endpoints given: the report has no token figures")
            endpoints = []
        yield endpoints, False
        return
    if host not in _LOOPBACK or metrics:  # our own services are not the ones that were named
        raise Failure(f"no orchestrator answers at {address}")
    tell(f"no orchestrator at {address}: starting the embedded pair")
    started = {**Pair().settings(), "orchestrator": {"LISTEN": address}}
    endpoints = [f"127.0.0.1:{free}" for free in _free_ports(len(_SERVICES))]
    for name, endpoint in zip(_SERVICES, endpoints, strict=True):
        started[name] = {**started[name], "METRICS_LISTEN": endpoint}
    with running(StackSettings(started, log_dir)):
        yield endpoints, True


def _answers(host: str, port: str) -> bool:
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS):
            return True
    except (OSError, ValueError, OverflowError):
        return False


def _free_ports(count: int) -> list[int]:
    """Free ports, which differ because all are held until the last one is known."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()

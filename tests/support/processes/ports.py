"""Free ports on loopback."""

from __future__ import annotations

import socket


def free_ports(count: int) -> list[int]:
    """This many different free ports."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def free_port() -> int:
    """A free port."""
    return free_ports(1)[0]

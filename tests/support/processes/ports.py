"""Free ports on loopback, for what comes later, or never.

They are outside of the range of which the system gives ports: nothing that another test starts or
connects takes one of them while nobody listens there.
"""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from pathlib import Path

_FIRST = 10_240
_SYSTEMS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int) -> list[int]:
    """This many different free ports."""
    last = int(_SYSTEMS.read_text().split()[0]) if _SYSTEMS.exists() else 32_768
    ports: list[int] = []
    with ExitStack() as probes:
        while len(ports) < count:
            probe = probes.enter_context(socket.socket())
            port = random.SystemRandom().randrange(_FIRST, last)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:  # taken
                continue
            ports.append(port)
    return ports


def free_port() -> int:
    """A free port."""
    return free_ports(1)[0]

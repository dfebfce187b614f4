"""Addresses of services that start at one moment."""

from __future__ import annotations

import socket
import subprocess
import sys

from tandem.tools.local.endpoints import free_or_other

TAKE = """
import sys
from tandem.tools.local.endpoints import free_or_other
print(free_or_other(sys.argv[1]), flush=True)
sys.stdin.read()
"""


def test_processes_that_start_at_one_moment_take_no_address_twice() -> None:
    """Though none of their services listens yet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-c", TAKE, address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline().decode().strip() == address
        assert free_or_other(address) == "127.0.0.1:0"
        other.communicate()
    assert free_or_other(address) == address

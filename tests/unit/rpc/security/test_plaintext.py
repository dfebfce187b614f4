"""Plaintext stays on the machine unless a setting explicitly allows it."""

from __future__ import annotations

import pytest

from tandem.errors import StartupError
from tandem.rpc.security.plaintext import check_plaintext, stays_here

HERE = [
    "127.0.0.1:50050",
    "127.8.9.1:1",
    "localhost:1",
    "[::1]:1",
    "unix:/run/tandem.sock",
    "unix:///run/tandem.sock",
    "unix-abstract:tandem",
    "ipv4:127.0.0.1:1",
    "ipv6:[::1]:1",
    "dns:///localhost:1",
]
ELSEWHERE = [
    "0.0.0.0:1",
    "[::]:1",
    ":1",
    "10.0.0.7:1",
    "target:50052",
    "localhost.example.org:1",
    "127.0.0.1.example.org:1",
    "dns:///target:1",
    "dns://127.0.0.1/target:1",
    "dns://127.0.0.1:53/target:1",
    "dns:target:1",
    "[fd00::1]:1",
    "passthrough:///10.0.0.1:1",
]


@pytest.mark.parametrize("address", HERE)
def test_this_machine_is_free(address: str) -> None:
    assert stays_here(address)
    check_plaintext(address, "loopback", "LISTEN", "CERT", "PLAINTEXT")


@pytest.mark.parametrize("address", ELSEWHERE)
def test_elsewhere_is_asked_for(address: str) -> None:
    assert not stays_here(address)
    check_plaintext(address, "allow", "LISTEN", "CERT", "PLAINTEXT")
    with pytest.raises(StartupError, match=r"^LISTEN: .* set CERT, or PLAINTEXT=allow"):
        check_plaintext(address, "loopback", "LISTEN", "CERT", "PLAINTEXT")

"""Where plaintext is allowed: only within this machine, unless a setting allows it."""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Literal

from tandem.errors import StartupError

# Values of the settings: plaintext within this machine only, or to any address.
Plaintext = Literal["loopback", "allow"]

_SCHEME = re.compile(r"(?:dns:(?://[^/]*/)?|ipv4:|ipv6:|passthrough:(?://[^/]*/)?)")


def host_of(address: str) -> str:
    """The host of "host:port" or of a gRPC target that ends so, without brackets."""
    place = address[match.end() :] if (match := _SCHEME.match(address)) else address
    if place.startswith("["):
        return place[1:].partition("]")[0]
    return place.rpartition(":")[0] or place


def stays_here(address: str) -> bool:
    """Whether traffic to or from an address never leaves the machine."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = host_of(address)
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a name, which may resolve to any address
        return False


def check_plaintext(address: str, said: Plaintext, named_by: str, instead: str, ask: str) -> None:
    """Check that an address may be used without TLS.

    Args:
        address: to listen on, or to connect to.
        said: value of the plaintext setting.
        named_by: the setting that has the address.
        instead: the settings that would turn on TLS.
        ask: the setting that can allow plaintext.

    Raises:
        StartupError: the address is beyond this machine, and plaintext is not allowed there.
    """
    if said != "allow" and not stays_here(address):
        raise StartupError(
            f"{named_by}: {address} is beyond this machine, and without TLS all can be read and"
            f" changed on the way; set {instead}, or {ask}=allow where the network itself keeps"
            " others out"
        )

"""Where plaintext may go: nowhere that others could listen, unless it is asked for by name."""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Literal

from tandem.errors import StartupError

# Of settings: only to this machine, or wherever the address says.
Plaintext = Literal["loopback", "allow"]

_SCHEME = re.compile(r"(?:dns:(?://[^/]*/)?|ipv4:|ipv6:|passthrough:(?://[^/]*/)?)")


def host_of(address: str) -> str:
    """The host in "host:port" or in a gRPC target with such an end; brackets are taken off."""
    place = address[match.end() :] if (match := _SCHEME.match(address)) else address
    if place.startswith("["):
        return place[1:].partition("]")[0]
    return place.rpartition(":")[0] or place


def stays_here(address: str) -> bool:
    """Whether what is sent to an address, or taken there, never leaves the machine."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = host_of(address)
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a name: it may be anywhere, and elsewhere tomorrow
        return False


def check_plaintext(address: str, said: Plaintext, named_by: str, instead: str, ask: str) -> None:
    """Let an address go that is to be used without TLS.

    Args:
        address: to listen on, or to connect to.
        said: what was asked for.
        named_by: the setting that has the address.
        instead: the settings that would bring TLS.
        ask: the setting that asks for plaintext.

    Raises:
        StartupError: others could listen, and nobody asked for it.
    """
    if said != "allow" and not stays_here(address):
        raise StartupError(
            f"{named_by}: {address} is beyond this machine, and without TLS all can be read and"
            f" changed on the way; set {instead}, or {ask}=allow where the network itself keeps"
            " others out"
        )

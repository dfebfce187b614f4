"""Where the replicas behind a name are. We ask DNS ourselves, so that each address is a replica."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

import aiodns

from tandem.errors import StartupError, Unavailable

_NAME = re.compile(
    r"dns://(?:(?P<server>\[[^/\]]+\]|[^/:]+)(?::(?P<at>\d{1,5}))?)?/(?P<host>\S+):(?P<port>\d{1,5})"
)
# Of one question to one server; the second try may go to another server.
_TRY_SECONDS = 2.0
_TRIES = 2
_DNS_PORT = 53


@dataclass(frozen=True)
class Name:
    """A name that several replicas share.

    Attributes:
        host: with A or AAAA records, one a replica.
        port: of each of them.
        server: that is asked, with its port; None asks those of the system.
    """

    host: str
    port: int
    server: tuple[str, int] | None = None


def name_of(target: str) -> Name | None:
    """The name in a gRPC target; None where the target is one replica.

    Args:
        target: "dns:///HOST:PORT" or "dns://SERVER[:PORT]/HOST:PORT" are names, with the
            server's IP address; "HOST:PORT" and all other targets are one replica, wherever gRPC
            finds it.

    Raises:
        StartupError: it begins like a name, and is none.
    """
    if not target.startswith("dns:"):
        return None
    match = _NAME.fullmatch(target)
    if match is None:
        raise StartupError(f"{target!r} is no dns:///HOST:PORT")
    server = None
    if match["server"]:
        server = _address(match["server"], target), _port(match["at"] or str(_DNS_PORT), target)
    return Name(match["host"], _port(match["port"], target), server)


def _port(digits: str, target: str) -> int:
    if not 0 < int(digits) < 1 << 16:
        raise StartupError(f"{target!r}: {digits} is no port")
    return int(digits)


def _address(server: str, target: str) -> str:
    """The IP address of the server to ask; a name would have to be looked up elsewhere first."""
    try:
        return str(ip_address(server.strip("[]")))
    except ValueError:
        raise StartupError(f"{target!r}: the server {server!r} is no IP address") from None


async def addresses_of(name: Name) -> list[str]:
    """Each address behind a name, with its port, sorted.

    c-ares asks: hosts file, search domains and time-outs are the system's. It is made again each
    time, since it would keep an answer for as long as its records say: pods come sooner.

    Raises:
        Unavailable: no answer, or no address in it.
    """
    where: dict[str, Any] = {}
    if name.server is not None:
        host, port = name.server
        where = {"nameservers": [host], "udp_port": port, "tcp_port": port}
    resolver = aiodns.DNSResolver(timeout=_TRY_SECONDS, tries=_TRIES, **where)
    try:
        found = await resolver.getaddrinfo(name.host, port=name.port, type=socket.SOCK_STREAM)
    except aiodns.error.DNSError as error:
        raise Unavailable(f"{name.host} has no address: {error.args[-1]}") from error
    finally:
        await resolver.close()
    hosts = {(node.family, node.addr[0].decode()) for node in found.nodes}
    return sorted(
        f"[{host}]:{name.port}" if family == socket.AF_INET6 else f"{host}:{name.port}"
        for family, host in hosts
    )

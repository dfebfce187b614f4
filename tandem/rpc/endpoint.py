"""Where a service is, and how it is spoken to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from tandem.rpc.channel import connect, connect_blocking

if TYPE_CHECKING:
    from tandem.rpc.security.tls import ClientTls


@dataclass(frozen=True)
class Endpoint:
    """A service, as its callers know it.

    Attributes:
        address: gRPC target, such as "127.0.0.1:50050".
        tls: None is plaintext.
        name: that its certificate has to have; empty is the address's host.
        token: to show with each call; empty shows none.
    """

    address: str
    tls: ClientTls | None = None
    name: str = ""
    token: str = ""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Of each call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    def connect(self) -> grpc.aio.Channel:
        """A channel."""
        credentials = self.tls.credentials() if self.tls else None
        return connect(self.address, credentials, self.name)

    def connect_blocking(self) -> grpc.Channel:
        """A channel for callers without an event loop."""
        credentials = self.tls.credentials() if self.tls else None
        return connect_blocking(self.address, credentials, self.name)


def endpoint_at(where: Endpoint | str) -> Endpoint:
    """An endpoint; an address alone is one in plaintext that asks for no token."""
    return Endpoint(where) if isinstance(where, str) else where

"""Channels to the replicas of one service, by TLS where it is set up."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import grpc

from tandem.rpc.channel import connect

if TYPE_CHECKING:
    from tandem.rpc.security.tls import ClientTls


class Dialer:
    """Makes channels.

    Attributes:
        age_seconds: at which a channel is to be left for another, so that each side looks at the
            other's certificate again.

    Args:
        tls: that they have; None is plaintext.
        name: that every replica's certificate has to have; empty is the host that it was found
            by.
        age_seconds: see there.
    """

    def __init__(
        self, tls: ClientTls | None = None, name: str = "", age_seconds: float = math.inf
    ) -> None:
        self.age_seconds = age_seconds
        self._tls = tls
        self._name = name

    @property
    def renews(self) -> bool:
        """Whether `version` may ever change."""
        return self._tls is not None

    @property
    def version(self) -> int:
        """Another one than before where a new channel would show, or trust, something else."""
        return 0 if self._tls is None else self._tls.version

    def connect(self, address: str, host: str = "") -> grpc.aio.Channel:
        """A new channel.

        Args:
            address: see `connect`.
            host: that the address was found by; empty where it is the address's own.
        """
        if self._tls is None:
            return connect(address)
        return connect(address, self._tls.credentials(), self._name or host)

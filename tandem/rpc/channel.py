"""Channel options of both sides: keepalive is a pair, so it is written down once."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from tandem.settings import ServiceSettings

if TYPE_CHECKING:
    from tandem.rpc.security.tls import ClientTls


# A peer that vanished without a word is noticed after at most 10 + 5 seconds. It is the ping's own
# time-out that ends the wait for its answer, and that has 60 seconds where it is not set.
KEEPALIVE_TIME_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000
# Of one attempt to connect. As long as an orchestrator by default waits for a first answer.
CONNECT_TIMEOUT_MS = 5_000
# Of an answer, from a peer that we chose: a tokenizer has some tens of megabytes.
MAX_ANSWER_BYTES = 64 << 20

_Options = Sequence[tuple[str, str | int]]


@dataclass(frozen=True)
class ConnectionAge:
    """How long a client may stay on one connection, and so on one replica.

    Attributes:
        seconds: until it is asked to open another, give or take a tenth.
        grace_seconds: that its calls may go on for after that.
    """

    seconds: float
    grace_seconds: float


def age_of(settings: ServiceSettings) -> ConnectionAge | None:
    """The age that a service's connections may have; None for any."""
    if not settings.connection_seconds:
        return None
    return ConnectionAge(settings.connection_seconds, settings.connection_grace_seconds)


def server_options(max_message_bytes: int, age: ConnectionAge | None = None) -> _Options:
    """Options of a server that takes requests of up to a size."""
    ends: _Options = ()
    if age is not None:
        ends = (
            ("grpc.max_connection_age_ms", round(1000 * age.seconds)),
            ("grpc.max_connection_age_grace_ms", round(1000 * age.grace_seconds)),
        )
    return (
        *ends,
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        # Lower than the clients' interval, else the server answers their pings with GOAWAY.
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
        ("grpc.max_receive_message_length", max_message_bytes),
        # Without this a second server binds the same port in silence and takes half the calls.
        ("grpc.so_reuseport", 0),
    )


CLIENT_OPTIONS: _Options = (
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    # The first pause, doubling up to the last: a replica is back within moments, or for long gone.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # What bounds an attempt, handshake of TLS included, whatever its name says: it is given up
    # after this, or at the next one's turn if that is later. Unset it is 20 s, for which a host
    # that swallows packets would hide another behind the same name; where it is the first pause,
    # a busy machine's handshakes are cut off, and begin again while it is as busy.
    ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
    # Channels of a process share connections by address, and their waits for the next attempt: one
    # to a replica that is back would fail for what another one met before, even one that is closed.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.service_config", json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})),
)


def connect(
    address: str,
    credentials: grpc.ChannelCredentials | None = None,
    name: str = "",
) -> grpc.aio.Channel:
    """A channel to a gRPC target ("host:port", "dns:///name:port").

    Args:
        address: the gRPC target.
        credentials: for TLS; None is plaintext.
        name: that the server's certificate has to have; empty is the address's host.
    """
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
    return grpc.aio.secure_channel(address, credentials, options=_options_for(name))


def connect_blocking(
    address: str,
    credentials: grpc.ChannelCredentials | None = None,
    name: str = "",
) -> grpc.Channel:
    """The same for callers without an event loop."""
    if credentials is None:
        return grpc.insecure_channel(address, options=CLIENT_OPTIONS)
    return grpc.secure_channel(address, credentials, options=_options_for(name))


def _options_for(name: str) -> _Options:
    """Options of a channel to a server whose certificate has a name; empty is the address's."""
    return (*CLIENT_OPTIONS, ("grpc.ssl_target_name_override", name)) if name else CLIENT_OPTIONS


class Dialer:
    """Makes channels.

    Attributes:
        age_seconds: at which a channel is to be left for another, so that each side looks at the
            other's certificate again.

    Args:
        tls: that they have; None is plaintext.
        name: that every replica's certificate has to have; empty is the host that it was found
            by.
        age_seconds: inf for a channel that is never left.
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

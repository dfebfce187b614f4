"""Channel options of both sides: keepalive is a pair, so it is written down once."""

from __future__ import annotations

import json
from collections.abc import Sequence

import grpc

# A peer that vanished without a word is noticed after at most 30 + 10 seconds.
KEEPALIVE_TIME_MS = 30_000
KEEPALIVE_TIMEOUT_MS = 10_000
# Of an answer, from a peer that we chose: a tokenizer has some tens of megabytes.
MAX_ANSWER_BYTES = 64 << 20

_Options = Sequence[tuple[str, str | int]]


def server_options(max_message_bytes: int) -> _Options:
    """Options of a server that takes requests of up to a size."""
    return (
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        # Lower than the clients' interval, else the server answers their pings with GOAWAY.
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
        ("grpc.max_receive_message_length", max_message_bytes),
        # Without this a second server binds the same port in silence and takes half the calls.
        ("grpc.so_reuseport", 0),
    )


CLIENT_OPTIONS: _Options = (
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.service_config", json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})),
)


def connect(address: str) -> grpc.aio.Channel:
    """A channel to a gRPC target ("host:port", "dns:///name:port")."""
    return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)

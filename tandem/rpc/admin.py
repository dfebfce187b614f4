"""The admin server: what probes and operators ask, in plaintext. No text passes there."""

from __future__ import annotations

import grpc
from grpc_channelz.v1 import channelz
from grpc_health.v1 import health_pb2_grpc

from tandem.rpc import reflection
from tandem.rpc.channel import server_options
from tandem.rpc.health import Health

# Of a question: it has a name or a number in it.
_MOST_BYTES = 64 << 10


def admin_server(service: str, health: Health) -> grpc.aio.Server:
    """Health, reflection, and channelz: all channels, servers and sockets of the process.

    Args:
        service: full name of what the process serves elsewhere.
        health: of it.
    """
    server = grpc.aio.server(options=server_options(_MOST_BYTES))
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    channelz.add_channelz_servicer(server)
    reflection.enable((service, "grpc.health.v1.Health", "grpc.channelz.v1.Channelz"), server)
    return server

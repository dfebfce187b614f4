"""The admin port: it asks for no credentials, and serves only what operators need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.rpc.channel import connect
from tests.support.processes.authorities import Authority
from tests.support.waiting import HANG_SECONDS
from tests.support.wire.gate import (
    ORCHESTRATOR,
    TOKEN,
    authority,
    serve,
    status_of,
    tls_of_client,
    tls_of_server,
    tokens_in,
)

__all__ = ["authority", "serve"]  # fixtures of the gate

_ADMIN = {
    "grpc.health.v1.Health",
    "grpc.reflection.v1alpha.ServerReflection",
    "grpc.channelz.v1.Channelz",
}


async def test_health_needs_neither_token_nor_name(
    serve: Callable[..., Any], authority: Authority, tmp_path: Path
) -> None:
    """And on the admin port no certificate; there is nothing else there but what operators ask."""
    tls = tls_of_server(authority, clients=("orchestrator",))
    server = await serve(tls, tokens_in(tmp_path, "ann"), admin=True)
    credentials = tls_of_client(authority, authority.sign("probe")).credentials()
    request = health_pb2.HealthCheckRequest(service=ORCHESTRATOR)
    for address, using in (
        (f"127.0.0.1:{server.port}", credentials),
        (f"127.0.0.1:{server.admin_port}", None),
    ):
        async with connect(address, using, "server") as channel:
            reply = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=HANG_SECONDS)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
    async with connect(f"127.0.0.1:{server.admin_port}") as channel:
        stub: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        assert await status_of(stub.Complete(pb.CompleteRequest())) is grpc.StatusCode.UNIMPLEMENTED
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        reflect: Any = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        async for answer in reflect(iter([asked])):
            listed = {service.name for service in answer.list_services_response.service}
            assert listed == {ORCHESTRATOR, *_ADMIN}
    assert server.handlers.reached == []


async def test_who_is_connected_is_told_on_the_admin_port_alone(
    serve: Callable[..., Any], authority: Authority, tmp_path: Path
) -> None:
    server = await serve(tokens=tokens_in(tmp_path, "ann"), admin=True)
    asked = channelz_pb2.GetServersRequest()
    metadata = (("authorization", f"Bearer {TOKEN}"),)
    async with connect(f"127.0.0.1:{server.port}") as public:
        stub: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(public)
        await stub.Complete(pb.CompleteRequest(), metadata=metadata)
        there: Any = channelz_pb2_grpc.ChannelzStub(public)
        assert (
            await status_of(there.GetServers(asked, metadata=metadata))
            is grpc.StatusCode.UNIMPLEMENTED
        )
        async with connect(f"127.0.0.1:{server.admin_port}") as admin:
            here: Any = channelz_pb2_grpc.ChannelzStub(admin)
            servers = (await here.GetServers(asked)).server
            sockets = [
                socket
                for one in servers
                for socket in (
                    await here.GetServerSockets(
                        channelz_pb2.GetServerSocketsRequest(server_id=one.ref.server_id)
                    )
                ).socket_ref
            ]
            assert any(one.data.calls_succeeded for one in servers)
            locals_ = set()
            for socket in sockets:
                found = await here.GetSocket(
                    channelz_pb2.GetSocketRequest(socket_id=socket.socket_id)
                )
                locals_.add(found.socket.local.tcpip_address.port)
            assert {server.port, server.admin_port} <= locals_

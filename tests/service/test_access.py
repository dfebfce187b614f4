"""Who gets in: over real sockets, no call of somebody else reaches a handler."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.rpc.access import Caller, caller
from tandem.rpc.channel import connect
from tandem.rpc.named_file import NamedFile
from tandem.rpc.server import RunningServer, Service
from tandem.rpc.tls import ClientTls, ServerTls, server_tls
from tandem.rpc.tokens import Tokens
from tandem.target.v1 import target_pb2, target_pb2_grpc
from tests.authorities import Authority, Pair

_ORCHESTRATOR = "tandem.orchestrator.v1.OrchestratorService"
_ADMIN = {
    "grpc.health.v1.Health",
    "grpc.reflection.v1alpha.ServerReflection",
    "grpc.channelz.v1.Channelz",
}
_TOKEN = "0123456789abcdef" * 2  # the same in each process, since tests are named by it


class Handlers(orchestrator_pb2_grpc.OrchestratorServiceServicer):
    """Note who reaches them. `going_on` holds streams until it is set."""

    def __init__(self) -> None:
        self.reached: list[Caller | None] = []
        self.going_on = asyncio.Event()
        self.going_on.set()

    async def Complete(self, request: Any, context: Any) -> pb.CompleteResponse:
        self.reached.append(caller())
        return pb.CompleteResponse(text="in")

    async def GetModelInfo(self, request: Any, context: Any) -> pb.GetModelInfoResponse:
        self.reached.append(caller())
        return pb.GetModelInfoResponse()

    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override]
        self.reached.append(caller())
        await context.write(pb.GenerateResponse())
        await self.going_on.wait()
        await context.write(pb.GenerateResponse())


class StreamHandlers(target_pb2_grpc.TargetServiceServicer):
    """The same of a service whose calls are streams both ways."""

    def __init__(self, reached: list[Caller | None]) -> None:
        self.reached = reached

    async def Verify(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        self.reached.append(caller())
        async for (
            _
        ) in request_iterator:  # a caller that is cut off while it writes is no subject here
            await context.write(target_pb2.VerifyResponse())

    async def GetModelInfo(self, request: Any, context: Any) -> target_pb2.GetModelInfoResponse:
        return target_pb2.GetModelInfoResponse()

    async def GetTokenizer(self, request: Any, context: Any) -> target_pb2.GetTokenizerResponse:
        return target_pb2.GetTokenizerResponse()


@dataclass
class Server:
    """A running one, and what reached its handlers."""

    port: int
    admin_port: int | None
    handlers: Handlers

    async def call(
        self, tls: ClientTls | None = None, name: str = "server", token: str = ""
    ) -> list[grpc.StatusCode | None]:
        """The statuses of a call of each kind, and of reflection; None is OK."""
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        credentials = tls.credentials() if tls else None
        async with connect(f"127.0.0.1:{self.port}", credentials, name) as channel:
            stub: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
            verify: Any = target_pb2_grpc.TargetServiceStub(channel).Verify
            asked = reflection_pb2.ServerReflectionRequest(list_services="")
            reflect: Any = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
            options: dict[str, Any] = {"metadata": metadata, "timeout": 10}
            return [
                await status_of(stub.Complete(pb.CompleteRequest(), **options)),
                await status_of(stub.Generate(pb.GenerateRequest(), **options)),
                await status_of(verify(iter([target_pb2.VerifyRequest()]), **options)),
                await status_of(reflect(iter([asked]), **options)),
            ]


async def status_of(call: Any) -> grpc.StatusCode | None:
    with suppress(grpc.aio.AioRpcError):
        while hasattr(call, "read") and await call.read() is not grpc.aio.EOF:
            pass
    code: grpc.StatusCode = await call.code()
    return None if code is grpc.StatusCode.OK else code


@pytest.fixture
async def serve() -> AsyncIterator[Callable[..., Any]]:
    async with AsyncExitStack() as stack:

        async def serving(
            tls: ServerTls | None = None, tokens: Tokens | None = None, admin: bool = False
        ) -> Server:
            handlers = Handlers()

            def add_to(server: grpc.aio.Server) -> None:
                orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server(handlers, server)
                streams = StreamHandlers(handlers.reached)
                target_pb2_grpc.add_TargetServiceServicer_to_server(streams, server)

            async def nothing() -> None:
                await asyncio.sleep(0)

            large = ("Complete", "Generate")
            service = Service(_ORCHESTRATOR, add_to, large, 4096, nothing, nothing, tokens=tokens)
            running = RunningServer("127.0.0.1:0", service, tls, "127.0.0.1:0" if admin else None)
            await running.start()
            await running.ready()
            stack.push_async_callback(running.stop, 0.0)
            return Server(running.port, running.admin_port, handlers)

        yield serving


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def tls_of_server(authority: Authority, *, clients: tuple[str, ...] = ()) -> ServerTls:
    pair = authority.sign("server")
    return server_tls(*files(pair), NamedFile("CA", authority.cert), clients)


def tls_of_client(authority: Authority, pair: Pair | None = None) -> ClientTls:
    """Without a look at the pair: a stranger does not check his own."""
    found = ClientTls(NamedFile("CA", authority.cert))
    if pair is None:
        return found
    cert, key = pair.cert.read_bytes(), pair.key.read_bytes()

    class Shown(ClientTls):
        def credentials(self) -> grpc.ChannelCredentials:
            return grpc.ssl_channel_credentials(authority.cert.read_bytes(), key, cert)

    return Shown(NamedFile("CA", authority.cert))


def files(pair: Pair) -> tuple[NamedFile, NamedFile]:
    return NamedFile("CERT", pair.cert), NamedFile("KEY", pair.key)


def tokens_in(folder: Path, owner: str) -> Tokens:
    (folder / "tokens").write_text(f"{owner} {_TOKEN}\n")
    return Tokens(NamedFile("TOKENS", folder / "tokens"))


_ALL = 4


async def test_who_is_known_gets_in(
    serve: Callable[..., Any], authority: Authority, tmp_path: Path
) -> None:
    """By certificate, by token and by both; each handler learns who it is."""
    mine = tls_of_client(authority, authority.sign("orchestrator"))
    server = await serve(tls_of_server(authority, clients=("orchestrator", "other")))
    assert await server.call(mine) == [None] * _ALL
    assert server.handlers.reached == [Caller("orchestrator", "certificate")] * 3
    tokens = tokens_in(tmp_path, "ann")
    server = await serve(tokens=tokens)
    assert await server.call(token=_TOKEN) == [None] * _ALL
    assert server.handlers.reached == [Caller("ann", "token")] * 3
    server = await serve(tls_of_server(authority), tokens)
    assert await server.call(mine, token=_TOKEN) == [None] * _ALL
    assert server.handlers.reached == [Caller("ann", "token")] * 3
    server = await serve()
    assert await server.call() == [None] * _ALL
    assert server.handlers.reached == [None] * 3


@pytest.mark.parametrize("who", ["nobody", "expired", "stranger", "self-signed", "plaintext"])
async def test_without_a_good_certificate_there_is_no_connection(
    who: str, serve: Callable[..., Any], authority: Authority, tmp_path: Path
) -> None:
    others = Authority(tmp_path)
    tls: dict[str, ClientTls | None] = {
        "nobody": tls_of_client(authority),
        "expired": tls_of_client(authority, authority.sign("late", days=-1)),
        "stranger": tls_of_client(authority, others.sign("orchestrator")),
        # Of the same name as the authority, and of another key.
        "self-signed": tls_of_client(authority, Authority(tmp_path, "authority").sign("x")),
        "plaintext": None,
    }
    server = await serve(tls_of_server(authority))
    assert await server.call(tls[who]) == [grpc.StatusCode.UNAVAILABLE] * _ALL
    assert server.handlers.reached == []


async def test_a_caller_knows_the_server_by_authority_and_name(
    serve: Callable[..., Any], authority: Authority, tmp_path: Path
) -> None:
    pair = authority.sign("orchestrator")
    server = await serve(tls_of_server(authority))
    refused = [grpc.StatusCode.UNAVAILABLE] * _ALL
    assert await server.call(tls_of_client(authority, pair), name="drafter") == refused
    assert await server.call(tls_of_client(Authority(tmp_path), pair)) == refused
    assert server.handlers.reached == []
    # Its address is a name too, which is asked for where no other is.
    assert await server.call(tls_of_client(authority, pair), name="") == [None] * _ALL


async def test_an_expired_server_is_not_spoken_to(
    serve: Callable[..., Any], authority: Authority
) -> None:
    """Its own start would have refused it; it may expire later."""
    pair = authority.sign("server", days=-1)
    key, chain = pair.key.read_bytes(), pair.cert.read_bytes()
    server = await serve(ServerTls(grpc.ssl_server_credentials([(key, chain)]), mutual=False))
    assert await server.call(tls_of_client(authority)) == [grpc.StatusCode.UNAVAILABLE] * _ALL
    assert server.handlers.reached == []


async def test_a_certificate_of_another_name_may_not_call(
    serve: Callable[..., Any], authority: Authority
) -> None:
    """A drafter's own certificate is no key to a target."""
    server = await serve(tls_of_server(authority, clients=("orchestrator",)))
    drafter = tls_of_client(authority, authority.sign("drafter"))
    assert await server.call(drafter) == [grpc.StatusCode.PERMISSION_DENIED] * _ALL
    assert server.handlers.reached == []


async def test_the_common_name_counts_where_there_is_no_other(
    serve: Callable[..., Any], authority: Authority
) -> None:
    server = await serve(tls_of_server(authority, clients=("old",)))
    old = tls_of_client(authority, authority.sign("old", bare=True))
    assert await server.call(old) == [None] * _ALL
    assert server.handlers.reached == [Caller("old", "certificate")] * 3


@pytest.mark.parametrize("token", ["", _TOKEN[:-1], f"{_TOKEN}0", "f" * 32])
async def test_without_a_good_token_nothing_is_handled(
    token: str, serve: Callable[..., Any], tmp_path: Path
) -> None:
    server = await serve(tokens=tokens_in(tmp_path, "ann"))
    assert await server.call(token=token) == [grpc.StatusCode.UNAUTHENTICATED] * _ALL
    assert server.handlers.reached == []


async def test_a_revoked_tokens_texts_end_and_no_other_begins(
    serve: Callable[..., Any], tmp_path: Path
) -> None:
    server = await serve(tokens=tokens_in(tmp_path, "ann"))
    server.handlers.going_on.clear()
    async with connect(f"127.0.0.1:{server.port}") as channel:
        stub: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        metadata = (("authorization", f"Bearer {_TOKEN}"),)
        running = stub.Generate(pb.GenerateRequest(), metadata=metadata)
        assert await running.read() == pb.GenerateResponse()
        (tmp_path / "tokens").write_text(f"bob {secrets.token_hex(16)}\n")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Complete(pb.CompleteRequest(), metadata=metadata)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "authorization: Bearer TOKEN" in (refused.value.details() or "")
        server.handlers.going_on.set()
        assert await running.read() == pb.GenerateResponse()
        assert await running.read() is grpc.aio.EOF
        assert await running.code() is grpc.StatusCode.OK
    assert len(server.handlers.reached) == 1


async def test_health_needs_neither_token_nor_name(
    serve: Callable[..., Any], authority: Authority, tmp_path: Path
) -> None:
    """And on the admin port no certificate; there is nothing else there but what operators ask."""
    tls = tls_of_server(authority, clients=("orchestrator",))
    server = await serve(tls, tokens_in(tmp_path, "ann"), admin=True)
    credentials = tls_of_client(authority, authority.sign("probe")).credentials()
    request = health_pb2.HealthCheckRequest(service=_ORCHESTRATOR)
    for address, using in (
        (f"127.0.0.1:{server.port}", credentials),
        (f"127.0.0.1:{server.admin_port}", None),
    ):
        async with connect(address, using, "server") as channel:
            reply = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
    async with connect(f"127.0.0.1:{server.admin_port}") as channel:
        stub: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        assert await status_of(stub.Complete(pb.CompleteRequest())) is grpc.StatusCode.UNIMPLEMENTED
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        reflect: Any = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        async for answer in reflect(iter([asked])):
            listed = {service.name for service in answer.list_services_response.service}
            assert listed == {_ORCHESTRATOR, *_ADMIN}
    assert server.handlers.reached == []


async def test_who_is_connected_is_told_on_the_admin_port_alone(
    serve: Callable[..., Any], authority: Authority, tmp_path: Path
) -> None:
    server = await serve(tokens=tokens_in(tmp_path, "ann"), admin=True)
    asked = channelz_pb2.GetServersRequest()
    metadata = (("authorization", f"Bearer {_TOKEN}"),)
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

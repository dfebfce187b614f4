"""A server with certificates and tokens that records the callers it admits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.rpc.channel import connect, connect_blocking
from tandem.rpc.security.access import Caller, caller
from tandem.rpc.security.files import NamedFile
from tandem.rpc.security.tls import ClientTls, ServerTls, server_tls
from tandem.rpc.security.tokens import BearerTokens
from tandem.rpc.server import GrpcService, RunningServer, Service
from tandem.target.v1 import target_pb2, target_pb2_grpc
from tests.support.processes.authorities import Authority, Pair

ORCHESTRATOR = "tandem.orchestrator.v1.OrchestratorService"
TOKEN = "0123456789abcdef" * 2  # the same in each process, since tests are named by it


class Handlers(orchestrator_pb2_grpc.OrchestratorServiceServicer):
    """Record the callers that reach them. Streams wait until `going_on` is set."""

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
    """The same for a service whose calls stream in both directions."""

    def __init__(self, reached: list[Caller | None]) -> None:
        self.reached = reached

    async def Verify(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        self.reached.append(caller())
        async for (
            _
        ) in request_iterator:  # callers that are cut off while they write are not tested here
            await context.write(target_pb2.VerifyResponse())

    async def GetModelInfo(self, request: Any, context: Any) -> target_pb2.GetModelInfoResponse:
        return target_pb2.GetModelInfoResponse()

    async def GetTokenizer(self, request: Any, context: Any) -> target_pb2.GetTokenizerResponse:
        return target_pb2.GetTokenizerResponse()


@dataclass
class Server:
    """A running server, with the callers that reached its handlers."""

    port: int
    admin_port: int | None
    handlers: Handlers

    async def call(
        self, tls: ClientTls | None = None, name: str = "server", token: str = ""
    ) -> list[grpc.StatusCode | None]:
        """The statuses of a call of each kind, and of reflection; None is OK."""
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        credentials = tls.credentials() if tls else None
        options: dict[str, Any] = {"metadata": metadata, "timeout": 10}

        def streamed() -> list[grpc.StatusCode | None]:
            """With the blocking client, as grpc.aio overwrites a status that arrives in a write."""
            with connect_blocking(f"127.0.0.1:{self.port}", credentials, name) as channel:
                verify: Any = target_pb2_grpc.TargetServiceStub(channel).Verify
                stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
                asked = reflection_pb2.ServerReflectionRequest(list_services="")
                calls = (
                    verify(iter([target_pb2.VerifyRequest()]), **options),
                    stub.ServerReflectionInfo(iter([asked]), **options),
                )
                return [_status_of_stream(call) for call in calls]

        async with connect(f"127.0.0.1:{self.port}", credentials, name) as channel:
            stub: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
            return [
                await status_of(stub.Complete(pb.CompleteRequest(), **options)),
                await status_of(stub.Generate(pb.GenerateRequest(), **options)),
                *await asyncio.to_thread(streamed),
            ]


def _status_of_stream(call: Any) -> grpc.StatusCode | None:
    try:
        for _ in call:
            pass
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return None


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
            tls: ServerTls | None = None, tokens: BearerTokens | None = None, admin: bool = False
        ) -> Server:
            handlers = Handlers()

            def add_to(server: grpc.aio.Server) -> None:
                orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server(handlers, server)
                streams = StreamHandlers(handlers.reached)
                target_pb2_grpc.add_TargetServiceServicer_to_server(streams, server)

            async def nothing() -> None:
                await asyncio.sleep(0)

            large = ("Complete", "Generate")
            own = GrpcService(ORCHESTRATOR, add_to, large)
            service = Service((own,), 4096, nothing, nothing, tokens=tokens)
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
    """A client's TLS without the checks of its own pair, which a hostile client would not make."""
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


def tokens_in(folder: Path, owner: str) -> BearerTokens:
    (folder / "tokens").write_text(f"{owner} {TOKEN}\n")
    return BearerTokens(NamedFile("TOKENS", folder / "tokens"))

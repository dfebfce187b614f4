"""A server of a service: bind, load, warm, ready, drain, stop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import grpc
import structlog
from grpc_channelz.v1 import channelz
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.errors import StartupError
from tandem.rpc import reflection
from tandem.rpc.channel import ConnectionAge, server_options
from tandem.rpc.health import Health
from tandem.rpc.security.access import AccessInterceptor
from tandem.rpc.streams.decoding import DecodingInterceptor

if TYPE_CHECKING:
    from tandem.rpc.security.tls import ServerTls
    from tandem.rpc.security.tokens import BearerTokens
    from tandem.telemetry.metrics.metering import Metering


_log = structlog.get_logger(__name__)
_HEALTH = "grpc.health.v1.Health"
# What a request has that carries neither a prompt nor a draft.
_SMALL_MESSAGE_BYTES = 64 << 10


@dataclass(frozen=True)
class GrpcService:
    """One gRPC service of a process; a process may have several over one engine.

    Attributes:
        name: full name, under which readiness is reported.
        add_to: registers the servicer.
        large_methods: that take prompts or drafts, by their names.
    """

    name: str
    add_to: Callable[[grpc.aio.Server], None]
    large_methods: Sequence[str]


class Front(Protocol):
    """Serves beside gRPC, in its own way."""

    @property
    def port(self) -> int:
        """The port in use."""

    async def start(self) -> None:
        """Answer calls from now on."""

    async def stop(self, grace_seconds: float) -> None:
        """Take nothing more on, and let what is on finish for the grace period."""

    def end_grace(self) -> None:
        """End what a `stop` in progress still waits for."""


@dataclass(frozen=True)
class Service:
    """What `tandem.rpc.process` runs.

    Attributes:
        grpc_services: that it answers; they become ready, and end, together.
        max_message_bytes: of requests to large methods; those to all others are small.
        become_ready: returns when requests can be answered; may take as long as it needs.
        stop: frees what the servicer holds, after the last request.
        lost: returns when the service can never answer again, its device being gone; None
            where it has none.
        drain: called at once when the service is to stop: it takes nothing more on; None where
            each call is a piece of work, and gRPC refuses new ones.
        drained: called then too: returns when the rest of the grace period need not be waited for.
            None where each call that is open is worth it.
        metering: its metrics; None if they are not read.
        unready: returns when requests can be answered no more; they can again when
            `become_ready` has returned another time. None where that does not happen.
        connection_age: how long a client may stay on one connection; None is for ever.
        tokens: one of which each call has to bring; None asks for none.
        fronts: that answer the same calls in another way.
        for_administrators: further services, at the admin port alone.
    """

    grpc_services: Sequence[GrpcService]
    max_message_bytes: int
    become_ready: Callable[[], Awaitable[None]]
    stop: Callable[[], Awaitable[None]]
    lost: Callable[[], Awaitable[object]] | None = None
    drain: Callable[[], None] | None = None
    drained: Callable[[], Awaitable[object]] | None = None
    metering: Metering | None = None
    unready: Callable[[], Awaitable[object]] | None = None
    connection_age: ConnectionAge | None = None
    tokens: BearerTokens | None = None
    fronts: Sequence[Front] = ()
    for_administrators: Sequence[GrpcService] = ()


class RunningServer:
    """A bound server whose health follows its service.

    Health: "" is SERVING while the process lives, each gRPC service's name while it is ready. All
    are NOT_SERVING when the service is lost, so that a supervisor restarts the process.
    """

    def __init__(
        self,
        listen: str,
        service: Service,
        tls: ServerTls | None = None,
        admin_listen: str | None = None,
    ) -> None:
        self._service = service
        most = service.max_message_bytes
        self._names = [one.name for one in service.grpc_services]
        limits = {
            f"/{one.name}/{method}": most
            for one in service.grpc_services
            for method in one.large_methods
        }
        self._server = grpc.aio.server(
            interceptors=[
                *_access(service, tls),
                DecodingInterceptor(limits, _SMALL_MESSAGE_BYTES),
            ],
            options=server_options(most, service.connection_age),
        )
        self._health = Health()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        for one in service.grpc_services:
            one.add_to(self._server)
        reflection.enable((*self._names, _HEALTH), self._server)
        self.port = _bind(self._server, listen, "LISTEN", tls)
        self._admin: grpc.aio.Server | None = None
        self.admin_port: int | None = None
        if admin_listen is not None:
            self._admin = admin_server(self._names, self._health, service.for_administrators)
            self.admin_port = _bind(self._admin, admin_listen, "ADMIN_LISTEN")
        self._ready: asyncio.Task[None] | None = None
        self._loss: asyncio.Task[None] | None = None
        self._readiness: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Answer health checks at once, and requests as soon as the service is ready.

        Raises:
            StartupError: the metrics' port is taken.
        """
        if self._service.metering is not None:
            self._service.metering.start()
        await self._set(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._server.start()
        for front in self._service.fronts:
            await front.start()
        if self._admin is not None:
            await self._admin.start()
        self._ready = asyncio.create_task(self._become_ready())

    async def _become_ready(self) -> None:
        await self._service.become_ready()
        await self._set(health_pb2.HealthCheckResponse.SERVING)
        _log.info("ready", port=self.port)
        if self._service.lost is not None:
            self._loss = asyncio.create_task(self._notice_loss(self._service.lost))
        if self._service.unready is not None:
            self._readiness = asyncio.create_task(self._follow(self._service.unready))

    async def _follow(self, unready: Callable[[], Awaitable[object]]) -> None:
        """Say whether requests can be answered, as that changes."""
        while True:
            await unready()
            await self._set(health_pb2.HealthCheckResponse.NOT_SERVING)
            await self._service.become_ready()
            await self._set(health_pb2.HealthCheckResponse.SERVING)
            _log.info("ready again")

    async def _notice_loss(self, lost: Callable[[], Awaitable[object]]) -> None:
        await lost()
        for name in ("", *self._names):
            await self._health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)

    async def _set(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in self._names:
            await self._health.set(name, status)

    async def ready(self) -> None:
        """Wait until the service is ready.

        Raises:
            StartupError: it cannot become ready as configured.
        """
        assert self._ready is not None
        await asyncio.shield(self._ready)

    async def stop(self, grace_seconds: float) -> None:
        """Refuse new requests, let running ones finish for the grace period, then free all."""
        for task in (self._ready, self._loss, self._readiness):
            if task is not None:
                task.cancel()
        await self._health.drain()
        if self._service.drain is not None:
            self._service.drain()
        await self._drain(grace_seconds)
        if self._admin is not None:
            await self._admin.stop(None)
        await self._service.stop()
        if self._service.metering is not None:
            await self._service.metering.stop()

    async def _drain(self, grace_seconds: float) -> None:
        stopped = asyncio.gather(
            self._server.stop(grace_seconds),
            *(front.stop(grace_seconds) for front in self._service.fronts),
        )
        if self._service.drained is None:
            await stopped
            return
        drained = asyncio.ensure_future(self._service.drained())
        try:
            await asyncio.wait((stopped, drained), return_when=asyncio.FIRST_COMPLETED)
            if not stopped.done():
                await self.end_grace()
            await stopped
        finally:
            drained.cancel()

    async def end_grace(self) -> None:
        """End what a `stop` in progress still waits for."""
        for front in self._service.fronts:
            front.end_grace()
        await self._server.stop(None)


def _access(service: Service, tls: ServerTls | None) -> list[grpc.aio.ServerInterceptor]:
    """Who asks for callers' names, where they have to prove any."""
    if service.tokens is None and not (tls and tls.mutual):
        return []
    return [AccessInterceptor(service.tokens, tls.clients if tls else ())]


def _bind(server: grpc.aio.Server, listen: str, setting: str, tls: ServerTls | None = None) -> int:
    """Bind an address, and return its port.

    Raises:
        StartupError: it cannot be had.
    """
    try:
        if tls is None:
            return server.add_insecure_port(listen)
        return server.add_secure_port(listen, tls.credentials)
    except RuntimeError as error:
        raise StartupError(
            f"cannot listen on {listen}: the port is taken or the address is not ours;"
            f" choose another with {setting}"
        ) from error


# Of a question: it has a name or a number in it.
_MOST_BYTES = 64 << 10


def admin_server(
    services: Sequence[str], health: Health, own: Sequence[GrpcService] = ()
) -> grpc.aio.Server:
    """Health, reflection, and channelz: all channels, servers and sockets of the process.

    Args:
        services: full names of what the process serves elsewhere.
        health: of them.
        own: further ones that only this server answers.
    """
    server = grpc.aio.server(options=server_options(_MOST_BYTES))
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    channelz.add_channelz_servicer(server)
    for one in own:
        one.add_to(server)
    names = (*services, *(one.name for one in own), _HEALTH, "grpc.channelz.v1.Channelz")
    reflection.enable(names, server)
    return server

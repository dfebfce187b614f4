"""The HTTP server beside gRPC's, on the same event loop."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ssl import SSLContext
from typing import Any

import h11
import structlog
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from tandem.errors import StartupError
from tandem.rpc.security.context import names_in

_log = structlog.get_logger(__name__)

# Of a request's line and headers, together.
_MOST_HEADER_BYTES = 32 << 10
# What a new connection, or one with half a header, may take for the rest.
_HEADER_SECONDS = 10.0
_KEEP_ALIVE_SECONDS = 30
_BACKLOG = 512


class _Protocol(H11Protocol):
    """A connection that has a time limit for its headers, and that the application can cut."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """See asyncio.Protocol."""
        super().connection_made(transport)
        names = names_in(transport.get_extra_info("peercert"))
        self.app_state = {**self.app_state, "cut": transport.abort, "names": names}
        self._wait_for_headers()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._wait_for_headers()
        else:
            self._have_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._have_headers()
        super().connection_lost(exc)

    def _wait_for_headers(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(_HEADER_SECONDS, self.transport.abort)

    def _have_headers(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The process has handlers of its own."""
        yield


class HttpServer:
    """Serves an ASGI application.

    Attributes:
        port: the port in use.
        sockets: that it listens on.

    Args:
        listen: host:port; port 0 takes a free one.
        app: the application.
        connections: at once, at most.
        tls: None serves plaintext.

    Raises:
        StartupError: the address cannot be had.
    """

    def __init__(
        self, listen: str, app: Any, connections: int, tls: SSLContext | None = None
    ) -> None:
        self.sockets = [_bind(listen)]
        self.port: int = self.sockets[0].getsockname()[1]
        # What it has to say is said by the application; of garbage that clients send, nothing.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        config = uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=connections,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            ssl_context_factory=None if tls is None else lambda *_: tls,
            h11_max_incomplete_event_size=_MOST_HEADER_BYTES,
            # A call's log lines and spans must not have those of the one that came before.
            reset_contextvars=True,
        )
        self._server = _Server(config)
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Answer calls from now on."""
        self._running = asyncio.create_task(self._server.serve(sockets=self.sockets))
        _log.info("listening for HTTP", port=self.port)

    async def stop(self, grace_seconds: float) -> None:
        """Take no new connections, and let calls finish for the grace period."""
        if self._running is None:
            self.sockets[0].close()
            return
        self._server.config.timeout_graceful_shutdown = int(grace_seconds)
        self._server.should_exit = True
        with suppress(asyncio.CancelledError):
            await self._running

    def end_grace(self) -> None:
        """End what a `stop` in progress still waits for."""
        self._server.force_exit = True
        for task in self._server.server_state.tasks:
            task.cancel()


def _bind(listen: str) -> socket.socket:
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    try:
        return socket.create_server(
            (host, int(port)),
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            backlog=_BACKLOG,
        )
    except OSError as error:
        raise StartupError(
            f"cannot serve HTTP on {listen}: {error.strerror or error};"
            " choose another HOST:PORT with HTTP_LISTEN"
        ) from error

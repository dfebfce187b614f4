"""The HTTP server beside gRPC's, on the same event loop."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ssl import SSLContext
from typing import Any, ClassVar

import h11
import structlog
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from orchestrator.front.http import errors, replies
from tandem.errors import InvalidRequest, StartupError
from tandem.rpc.security.context import names_in

_log = structlog.get_logger(__name__)

# Of a request's line and headers, together.
_MOST_HEADER_BYTES = 32 << 10
# What a new connection, or one with half a header, may take for the rest.
_HEADER_SECONDS = 10.0
# How long the rest of a body is read whose call was answered before it came.
_REST_SECONDS = 2.0
_KEEP_ALIVE_SECONDS = 30
_BACKLOG = 512
# For the last words of calls that were ended.
_LAST_SECONDS = 2.0


@dataclass(frozen=True)
class ConnectionLimits:
    """Bounds on connections.

    Attributes:
        most: at once.
        idle_seconds: that a client may not read what was sent to it.
        age_seconds: after which a connection is closed after a reply; 0 is never.
    """

    most: int
    idle_seconds: float
    age_seconds: float = 0.0


class _Protocol(H11Protocol):
    """A connection within bounds, which the application can cut.

    uvicorn has no options for them: it bounds neither the connections (above `limit_concurrency` it
    answers each), nor the time of a header or of the rest of a body, nor whole headers, nor a reply
    that is not read. A release that changes what is used of its private parts fails
    tests/service/http/test_connections.py and test_access.py, which hold each bound.
    """

    limits: ClassVar[ConnectionLimits]

    def connection_made(self, transport: Any) -> None:
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self._timer: asyncio.TimerHandle | None = None
        self._old_at = self.loop.time() + (self.limits.age_seconds or float("inf"))
        if len(self.connections) > self.limits.most:
            transport.abort()
            return
        names = names_in(transport.get_extra_info("peercert"))
        self.app_state = {**self.app_state, "cut": transport.abort, "names": names}
        self._abort_in(_HEADER_SECONDS)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        while data and not self.transport.is_closing():
            room = len(data)
            if self.conn.their_state is h11.IDLE:
                # h11 bounds headers that are not whole; whole ones it takes however long they are.
                room = max(_MOST_HEADER_BYTES + 1 - len(self.conn.trailing_data[0]), 1)
            super().data_received(data[:room])
            data = data[room:]
        if self.transport.is_closing():
            return
        state = self.conn.their_state
        if state is h11.IDLE:
            if self._timer is None:
                self._abort_in(_HEADER_SECONDS)
        elif self.cycle is not None and self.cycle.response_complete:
            pass  # the rest of a body; its time runs
        else:
            self._go_on()
        if state is h11.DONE and self.cycle is not None and not self.cycle.response_complete:
            # A further request waits. Reading goes on, to see that the client leaves.
            if len(self.conn.trailing_data[0]) > _MOST_HEADER_BYTES:
                self.transport.abort()
            else:
                self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """See uvicorn: a reply was handed to the connection."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._abort_in(self.limits.idle_seconds)
        elif self.conn.their_state is h11.SEND_BODY:
            self._abort_in(_REST_SECONDS)
        elif self.loop.time() >= self._old_at:
            self.transport.close()
            self._abort_in(self.limits.idle_seconds)
        elif self.transport.get_write_buffer_size():
            self._go_on()
            self._timer = self.loop.call_later(self.limits.idle_seconds, self._abort_unread)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._go_on()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """See uvicorn: what came is no HTTP."""
        body = replies.encoded(errors.body_of(InvalidRequest("request: no valid HTTP")))
        head = [("content-type", "application/json"), ("connection", "close")]
        parts = (
            h11.Response(status_code=400, headers=[*head, ("content-length", str(len(body)))]),
            h11.Data(data=body),
            h11.EndOfMessage(),
        )
        for part in parts:
            self.transport.write(self.conn.send(part) or b"")
        self.transport.close()
        self._abort_in(self.limits.idle_seconds)

    def _abort_in(self, seconds: float) -> None:
        self._go_on()
        self._timer = self.loop.call_later(seconds, self.transport.abort)

    def _abort_unread(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def _go_on(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


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
        limits: on connections.
        tls: None serves plaintext.

    Raises:
        StartupError: the address cannot be had.
    """

    def __init__(
        self, listen: str, app: Any, limits: ConnectionLimits, tls: SSLContext | None = None
    ) -> None:
        self.sockets = [_bind(listen)]
        self.port: int = self.sockets[0].getsockname()[1]
        # The application logs what matters; malformed requests of clients are not logged.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        config = uvicorn.Config(
            app,
            http=type("_Bounded", (_Protocol,), {"limits": limits}),
            interface="asgi3",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
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
        if calls := self._server.server_state.tasks:
            await asyncio.wait(calls, timeout=_LAST_SECONDS)

    def end_grace(self) -> None:
        """End what a `stop` in progress still waits for."""
        self._server.force_exit = True
        for task in self._server.server_state.tasks:
            task.cancel()


def _bind(listen: str) -> socket.socket:
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    try:
        listening = socket.create_server(
            (host, int(port)),
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            backlog=_BACKLOG,
        )
        # Connections inherit it. uvloop sets it itself; with asyncio's own loop a reply's body
        # would wait 40 ms until the client has acknowledged its headers.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except OSError as error:
        raise StartupError(
            f"cannot serve HTTP on {listen}: {error.strerror or error};"
            " choose another HOST:PORT with HTTP_LISTEN"
        ) from error

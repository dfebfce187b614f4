"""The Prometheus endpoint: a port and a thread of its own."""

from __future__ import annotations

import socket
import threading
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from tandem.errors import StartupError

# A client that says nothing, or a byte now and then, must not stop the others.
_CLIENT_SECONDS = 5.0
_CLIENTS = 8
# How often it looks whether it is to stop.
_POLL_SECONDS = 0.1


class _Quiet(WSGIRequestHandler):
    """Answers without a line in the log for each scrape."""

    timeout = _CLIENT_SECONDS

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each client, of a few at once."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, *arguments: Any) -> None:
        self._places = threading.BoundedSemaphore(_CLIENTS)
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer it, or hang up where too many are answered already."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """End with the client after a while, whatever it sends until then."""
        hanging_up = threading.Timer(_CLIENT_SECONDS, self.shutdown_request, (request,))
        hanging_up.daemon = True
        hanging_up.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            hanging_up.cancel()
            self._places.release()

    def server_bind(self) -> None:
        """Bind, and ask no name server who we are."""
        TCPServer.server_bind(self)
        host, self.server_port = self.server_address[:2]
        self.server_name = str(host)
        self.setup_environ()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away, or stands still, is its own affair."""


class _Server6(_Server):
    address_family = socket.AF_INET6


class Exposition:
    """Serves a registry: as text, or as OpenMetrics with exemplars where that is asked for.

    Attributes:
        port: that is served on.

    Args:
        listen: host:port; port 0 takes a free one.
        registry: to show.

    Raises:
        StartupError: the port is taken, or the address is not ours.
    """

    def __init__(self, listen: str, registry: CollectorRegistry) -> None:
        host, _, port = listen.rpartition(":")
        try:
            self._server = make_server(
                host.strip("[]"),
                int(port),
                make_wsgi_app(registry),
                server_class=_Server6 if host.startswith("[") else _Server,
                handler_class=_Quiet,
            )
        except OSError as error:
            raise StartupError(
                f"cannot serve metrics on {listen}: {error.strerror or error};"
                " choose another HOST:PORT with METRICS_LISTEN"
            ) from error
        self.port = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_SECONDS,), name="metrics", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Give the port back. Scrapes that are under way end with the process."""
        self._server.shutdown()
        self._server.server_close()

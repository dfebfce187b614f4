"""The Prometheus endpoint, with its own port and thread."""

from __future__ import annotations

import socket
import threading
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from tandem.errors import StartupError

# Time limit of a client: one that sends nothing, or a byte now and then, must not block others.
_CLIENT_SECONDS = 5.0
_CLIENTS = 8
# How often the server checks whether to stop.
_POLL_SECONDS = 0.1


class _Quiet(WSGIRequestHandler):
    """Answers without a line in the log for each scrape."""

    timeout = _CLIENT_SECONDS

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each client, for a few clients at once."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, *arguments: Any) -> None:
        self._places = threading.BoundedSemaphore(_CLIENTS)
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a client, or hang up if too many are being served."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a client, and hang up after a time limit whatever it sends."""
        hanging_up = threading.Timer(_CLIENT_SECONDS, self.shutdown_request, (request,))
        hanging_up.daemon = True
        hanging_up.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            hanging_up.cancel()
            self._places.release()

    def server_bind(self) -> None:
        """Bind without asking a name server for our own host name."""
        TCPServer.server_bind(self)
        host, self.server_port = self.server_address[:2]
        self.server_name = str(host)
        self.setup_environ()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a client that goes away or stalls."""


class _Server6(_Server):
    address_family = socket.AF_INET6


class Exposition:
    """Serves a registry: as text, or as OpenMetrics with exemplars if a client asks for it.

    Attributes:
        port: the port in use.

    Args:
        listen: host:port; port 0 takes a free one.
        registry: to serve.

    Raises:
        StartupError: the port is taken, or the address is not one of this machine.
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
        """Close the port. Running scrapes end with the process."""
        self._server.shutdown()
        self._server.server_close()

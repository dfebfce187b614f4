"""An OpenTelemetry collector that takes spans and metrics over HTTP, and keeps them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer


class Collector(HTTPServer):
    """Listens on a free port of loopback.

    Attributes:
        taken: paths and bodies of requests, in order of arrival.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Take)
        self.taken: list[tuple[str, bytes]] = []


class _Take(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.taken.append((self.path, body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Keep standard error clean."""


@contextmanager
def collecting() -> Iterator[Collector]:
    """A running collector."""
    server = Collector()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

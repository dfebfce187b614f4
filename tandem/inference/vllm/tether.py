"""A connection between the machines of one model, by which each notices that another is gone."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

# A machine that loses its power says nothing: after these seconds of silence it is asked, and
# after as many unanswered questions it is gone.
_SILENT_SECONDS, _QUESTIONS = 5, 3


class Tether:
    """Held for as long as the model serves.

    Args:
        gone: is called in a thread when another machine is gone.
    """

    def __init__(self, gone: Callable[[str], None]) -> None:
        self._gone, self._closing = gone, False
        self._open: list[socket.socket] = []

    def listen(self, port: int) -> None:
        """Have the others connect to this machine."""
        server = socket.create_server(("", port))
        self._open.append(server)
        threading.Thread(target=self._accept, args=(server,), daemon=True).start()

    def connect(self, host: str, port: int, seconds: float) -> None:
        """Connect to the first machine, which may start later.

        Raises:
            OSError: it is not there in time.
        """
        until = time.monotonic() + seconds
        while True:
            try:
                self._watch(socket.create_connection((host, port)), host)
                return
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.2)

    def close(self) -> None:
        """From here on no rank is missed."""
        self._closing = True
        for each in self._open:
            with suppress(OSError):  # not connected any more
                each.shutdown(socket.SHUT_RDWR)  # wakes its thread
            each.close()

    def _accept(self, server: socket.socket) -> None:
        while True:
            try:
                connection, (host, *_) = server.accept()
            except OSError:  # closed
                return
            self._watch(connection, host)

    def _watch(self, connection: socket.socket, host: str) -> None:
        self._open.append(connection)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            connection.setsockopt(socket.IPPROTO_TCP, option, _SILENT_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _QUESTIONS)
        threading.Thread(target=self._read, args=(connection, host), daemon=True).start()

    def _read(self, connection: socket.socket, host: str) -> None:
        with suppress(OSError):
            connection.recv(1)  # nothing is ever sent
        if not self._closing:
            self._gone(f"the machine {host} is gone")

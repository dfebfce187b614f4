"""A TCP proxy that adds latency: every byte arrives later, but bytes do not queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_CHUNK_BYTES = 2**16


class DelayProxy:
    """Forwards connections to a target address.

    Attributes:
        delay_s: one-way delay of every chunk from now on. The event loop's timers are accurate to
            about a millisecond.
        address: that it listens on.

    Args:
        target: host:port.
    """

    def __init__(self, target: str) -> None:
        self.delay_s = 0.0
        self.address = ""
        self._host, _, self._port = target.rpartition(":")
        self._connections: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[DelayProxy]:
        """Listen on a free port; at the end of the context connections are cut."""
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        try:
            yield self
        finally:
            server.close()
            for connection in self._connections:
                connection.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        writers = [writer]
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
            writers.append(far_writer)
            await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
        except (OSError, asyncio.CancelledError):
            # If either side or the proxy ends, the connection ends.
            pass
        finally:
            for each in writers:
                each.close()
            self._connections.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read as fast as data comes, write each chunk when it is due, and at last the end."""
        loop = asyncio.get_running_loop()
        on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while True:
                due, chunk = await on_the_way.get()
                if (wait := due - loop.time()) > 0:
                    await asyncio.sleep(wait)
                if not chunk:
                    break
                writer.write(chunk)
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()

        async def receive() -> None:
            chunk = b"-"
            while chunk:
                chunk = await reader.read(_CHUNK_BYTES)
                on_the_way.put_nowait((loop.time() + self.delay_s, chunk))

        await asyncio.gather(receive(), deliver())

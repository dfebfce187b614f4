"""A proxy that injects faults between an orchestrator and a service.

It parses HTTP/2 frames and the gRPC messages in them, so that a fault can be placed at a message:
an opening, a step, an answer or a close.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

from google.protobuf.message import DecodeError

from tandem.drafter.v1 import drafter_pb2
from tandem.target.v1 import target_pb2

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FRAME_HEADER = 9
_DATA = 0
_PADDED = 0x8
# Of a message in a stream: whether it is compressed, and its length.
_MESSAGE_HEADER = 5


class Way(Enum):
    """A direction, as the orchestrator sees it."""

    THERE = "to the service"
    BACK = "from the service"


_MESSAGES: dict[tuple[str, Way], Callable[[], Any]] = {
    ("drafter", Way.THERE): drafter_pb2.DraftRequest,
    ("drafter", Way.BACK): drafter_pb2.DraftResponse,
    ("target", Way.THERE): target_pb2.VerifyRequest,
    ("target", Way.BACK): target_pb2.VerifyResponse,
}


@dataclass
class Passing:
    """A frame on its way.

    Attributes:
        way: that it goes.
        kinds: of the requests or answers in the messages that it completes: "open", "draft",
            "verify", "close"; "opened", "drafted", "verdict", "ended".
        frame: its bytes; what is put here is sent instead, and nothing where that is empty.
        line: that it is on.
    """

    way: Way
    kinds: tuple[str, ...]
    frame: bytes
    line: Line

    def corrupt(self) -> None:
        """Turn the bits of the message's second half around; its frame stays one."""
        start = _FRAME_HEADER + _MESSAGE_HEADER
        middle = start + (len(self.frame) - start) // 2
        turned = bytes(byte ^ 0xFF for byte in self.frame[middle:])
        self.frame = self.frame[:middle] + turned

    def drop(self) -> None:
        """Have it never arrive."""
        self.frame = b""


async def _nothing(passing: Passing) -> None:
    """Let it pass."""


class Proxy:
    """Listens on a free port of the loopback, and leads to a service.

    Attributes:
        address: where it listens.
        upstream: host:port of the service; may change.
        interfere: awaited with each frame of a call before it is sent on; may change or drop it,
            wait, or cut the line.
        delay: seconds that each frame takes.

    Args:
        role: "drafter" or "target".
        upstream: see there.
    """

    def __init__(self, role: str, upstream: str) -> None:
        self.role = role
        self.upstream = upstream
        self.address = ""
        self.interfere: Callable[[Passing], Awaitable[None]] = _nothing
        self.delay = 0.0
        self._open = {way: asyncio.Event() for way in Way}
        for event in self._open.values():
            event.set()
        self._lines: set[Line] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Begin to listen."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Listen no more, and cut all lines."""
        assert self._server is not None
        self._server.close()
        self.cut()
        self.release()
        while self._lines:  # noqa: ASYNC110  # each ends by itself now
            await asyncio.sleep(0.001)

    def hold(self, *ways: Way) -> None:
        """Forward nothing that way, and say so to nobody: the line is half open."""
        for way in ways or Way:
            self._open[way].clear()

    def release(self) -> None:
        """Forward again, and what was held first."""
        for event in self._open.values():
            event.set()

    def cut(self, *, reset: bool = True) -> None:
        """End all lines: by RST, or by FIN."""
        for line in tuple(self._lines):
            line.cut(reset=reset)

    async def opened(self, way: Way) -> None:
        """Wait until that way is not held."""
        await self._open[way].wait()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self.upstream.rpartition(":")
        try:
            there, back = await asyncio.open_connection(host, int(port))
        except OSError:
            _reset(writer)
            return
        line = Line(self, (reader, writer), (there, back))
        self._lines.add(line)
        try:
            await line.run()
        finally:
            self._lines.discard(line)


_Side = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Line:
    """One connection."""

    def __init__(self, proxy: Proxy, near: _Side, far: _Side) -> None:
        self._proxy = proxy
        self._near = near
        self._far = far
        # Streams that carry sequences, learnt from their requests.
        self._calls: set[int] = set()

    async def run(self) -> None:
        """Forward both ways until one ends."""
        ways = (
            asyncio.create_task(self._pass(Way.THERE, self._near[0], self._far[1])),
            asyncio.create_task(self._pass(Way.BACK, self._far[0], self._near[1])),
        )
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            # Who has ended has said all: what is on its way to the other goes out.
            reset = any(task.done() and task.exception() is not None for task in ways)
            self.cut(reset=reset)
        finally:
            for task in ways:
                task.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    def cut(self, *, reset: bool = True) -> None:
        """End the connection on both sides."""
        for _, writer in (self._near, self._far):
            if reset:
                _reset(writer)
            else:
                writer.close()

    async def _pass(
        self, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        frames, messages = _Frames(way), _Messages(self._proxy.role, way, self._calls)
        while data := await reader.read(1 << 16):
            for frame in frames.split(data):
                passing = Passing(way, tuple(messages.kinds_of(frame)), frame, self)
                if passing.kinds:
                    await self._proxy.interfere(passing)
                if self._proxy.delay:
                    await asyncio.sleep(self._proxy.delay)
                await self._proxy.opened(way)
                if passing.frame:
                    writer.write(passing.frame)
            await writer.drain()
        await self._proxy.opened(way)  # an end is not heard of either


class _Frames:
    """Cuts a way's bytes into HTTP/2 frames; the client's preface goes with its first."""

    def __init__(self, way: Way) -> None:
        self._preface = len(_PREFACE) if way is Way.THERE else 0
        self._buffer = bytearray()

    def split(self, data: bytes) -> Iterator[bytes]:
        self._buffer += data
        while len(self._buffer) >= self._preface + _FRAME_HEADER:
            start = self._preface
            size = start + _FRAME_HEADER + int.from_bytes(self._buffer[start : start + 3], "big")
            if len(self._buffer) < size:
                return
            frame = bytes(self._buffer[:size])
            del self._buffer[:size]
            self._preface = 0
            yield frame


class _Messages:
    """Reads the messages of streams that carry sequences; all others are no matter."""

    def __init__(self, role: str, way: Way, calls: set[int]) -> None:
        self._make = _MESSAGES[role, way]
        self._way = way
        self._calls = calls
        self._buffers: dict[int, bytearray] = {}

    def kinds_of(self, frame: bytes) -> Iterator[str]:
        """Of what a frame completes."""
        if frame.startswith(_PREFACE) or frame[3] != _DATA:
            return
        stream = int.from_bytes(frame[5:9], "big") & 0x7FFFFFFF
        body = frame[_FRAME_HEADER:]
        if frame[4] & _PADDED:
            body = body[1 : len(body) - body[0]]
        buffer = self._buffers.setdefault(stream, bytearray())
        buffer += body
        while len(buffer) >= _MESSAGE_HEADER:
            (length,) = struct.unpack(">I", buffer[1:_MESSAGE_HEADER])
            end = _MESSAGE_HEADER + length
            if len(buffer) < end:
                return
            message = bytes(buffer[_MESSAGE_HEADER:end])
            del buffer[:end]
            yield from self._read(stream, message)

    def _read(self, stream: int, encoded: bytes) -> Iterator[str]:
        message = self._make()
        try:
            message.ParseFromString(encoded)
        except DecodeError:
            return
        if self._way is Way.BACK:
            if stream in self._calls:
                yield from (response.WhichOneof("result") for response in message.responses)
            return
        kinds = [request.WhichOneof("step") for request in message.requests]
        if kinds and all(kinds):  # a question of another method reads as none of them
            self._calls.add(stream)
            yield from kinds


def _reset(writer: asyncio.StreamWriter) -> None:
    """Have a connection end by RST."""
    connection = writer.get_extra_info("socket")
    if connection is not None and not writer.is_closing():
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@asynccontextmanager
async def proxied(role: str, upstream: str) -> AsyncIterator[Proxy]:
    """A proxy in front of a service, for as long as the block."""
    proxy = Proxy(role, upstream)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()

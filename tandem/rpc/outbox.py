"""What waits to be written to a stream: messages of several sequences go out as one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

# Of what goes out as one: no service takes less (MAX_MESSAGE_MIB). A larger message of one
# sequence goes alone.
BATCH_BYTES = 1 << 20


class Outbox:
    """Encoded messages, in order.

    A message of a stream is a list of entries, and so the encoding of several messages, one
    behind the other, is that of one with all their entries: nothing is encoded twice.

    A write waits until the loop has had its turn, so that what other sequences say at the same
    time goes with it.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[bytes, Callable[[], None] | None]] = deque()
        self._changed: asyncio.Future[None] | None = None
        self._taken: asyncio.Future[None] | None = None
        self._finished = False

    def put(self, message: bytes, written: Callable[[], None] | None = None) -> None:
        """Have a message written.

        Args:
            message: encoded.
            written: called when it is on the wire.
        """
        self._waiting.append((message, written))
        self._wake()

    async def room(self, most: int) -> None:
        """Wait until no more than so many messages wait."""
        while len(self._waiting) > most:
            self._taken = asyncio.get_running_loop().create_future()
            await self._taken

    def finish(self) -> None:
        """Nothing comes any more; `pour` returns when all is written."""
        self._finished = True
        self._wake()

    def _wake(self) -> None:
        _resolve(self._changed)

    async def pour(
        self,
        write: Callable[[bytes], Awaitable[None]],
        seconds: float,
        late: Callable[[], object],
    ) -> None:
        """Write what comes, until it is finished.

        Args:
            write: of the stream.
            seconds: that a write may take.
            late: called when one takes longer; it goes on nevertheless.
        """
        loop = asyncio.get_running_loop()
        while self._waiting or not self._finished:
            if not self._waiting:
                self._changed = loop.create_future()
                await self._changed
                continue
            message, written = self._next()
            timer = loop.call_later(seconds, late)
            try:
                await write(message)
            finally:
                timer.cancel()
            for call in written:
                call()

    def _next(self) -> tuple[bytes, list[Callable[[], None]]]:
        """The next message to write, made of as many as fit, and whom to tell of it."""
        parts: list[bytes] = []
        written: list[Callable[[], None]] = []
        size = 0
        while self._waiting and (not parts or size + len(self._waiting[0][0]) <= BATCH_BYTES):
            part, call = self._waiting.popleft()
            parts.append(part)
            size += len(part)
            if call is not None:
                written.append(call)
        _resolve(self._taken)
        return b"".join(parts), written


def _resolve(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)

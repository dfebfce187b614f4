"""What waits to be written to a stream: messages of several sequences go out as one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple

# Of what goes out as one: no service of ours takes less (MAX_MESSAGE_MIB). A larger message of
# one sequence goes alone.
BATCH_BYTES = 1 << 20
# Messages that go out as one: what a service takes (common.proto).
BATCH_MESSAGES = 1024


class _Waiting(NamedTuple):
    message: bytes
    owner: int
    written: Callable[[], None] | None


class Outbox:
    """Encoded messages, in order.

    A message of a stream is a list of entries, and so the encoding of several messages, one
    after the other, is that of one with all their entries: nothing is encoded twice.

    A write waits until the loop has had its turn, so that what other sequences say at the same
    time goes with it.
    """

    def __init__(self) -> None:
        self._waiting: deque[_Waiting] = deque()
        self._bytes = 0
        self._changed: asyncio.Future[None] | None = None
        self._taken: asyncio.Future[None] | None = None
        self._finished = False

    def put(
        self, message: bytes, owner: int = 0, written: Callable[[], None] | None = None
    ) -> None:
        """Have a message written.

        Args:
            message: encoded.
            owner: whose it is, for `discard`.
            written: called when it is on the wire.
        """
        self._waiting.append(_Waiting(message, owner, written))
        self._bytes += len(message)
        _resolve(self._changed)

    def discard(self, owner: int) -> int:
        """Forget what still waits of an owner; how many messages that were."""
        kept = deque(entry for entry in self._waiting if entry.owner != owner)
        gone = len(self._waiting) - len(kept)
        if gone:
            self._waiting = kept
            self._bytes = sum(len(entry.message) for entry in kept)
        return gone

    async def room(self, most: int, most_bytes: int) -> None:
        """Wait until the messages that wait, and their bytes, are no more than allowed."""
        while len(self._waiting) > most or self._bytes > most_bytes:
            self._taken = asyncio.get_running_loop().create_future()
            await self._taken

    def finish(self) -> None:
        """Nothing comes any more; `pour` returns when all is written."""
        self._finished = True
        _resolve(self._changed)

    def abandon(self) -> None:
        """Forget what waits; `pour` returns when the message that it writes is out."""
        self._waiting.clear()
        self._bytes = 0
        self.finish()

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
                for call in written:  # where it failed, its spans are what is looked for
                    call()

    def _next(self) -> tuple[bytes, list[Callable[[], None]]]:
        """The next message to write, made of as many as fit, and whom to tell of it."""
        parts: list[bytes] = []
        written: list[Callable[[], None]] = []
        size = 0
        while self._waiting and len(parts) < BATCH_MESSAGES:
            entry = self._waiting[0]
            if parts and size + len(entry.message) > BATCH_BYTES:
                break
            self._waiting.popleft()
            parts.append(entry.message)
            size += len(entry.message)
            if entry.written is not None:
                written.append(entry.written)
        self._bytes -= size
        _resolve(self._taken)
        return b"".join(parts), written


def _resolve(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)

"""Slow work on requests, beside the event loop: so much at once, and so much that waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from orchestrator.front.queue import QueueLimits, TextQueue
from orchestrator.pool.capacity import TargetCapacity
from orchestrator.text.codec import TextCodec
from tandem.errors import Unavailable

T = TypeVar("T")


class PromptEncoder:
    """Encodes prompts in threads of its own, of the client first that has the fewest there.

    A prompt of half a million characters takes seconds, and other texts go on meanwhile: the
    codec gives the interpreter's lock away while it works.

    Args:
        codec: the target's tokenizer.
        at_once: prompts being encoded.
        limits: on those that wait for that.
    """

    def __init__(self, codec: TextCodec, at_once: int, limits: QueueLimits) -> None:
        self._codec = codec
        room = TargetCapacity(at_once)
        self._queue = TextQueue(lambda: room, limits)
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="encode")

    @property
    def waiting(self) -> int:
        """Prompts that wait for a thread."""
        return self._queue.waiting

    async def encode(
        self,
        text: str,
        client: str = "",
        remaining: float | None = None,
        *,
        special: bool = True,
    ) -> list[int]:
        """Token ids.

        Args:
            text: the prompt.
            client: whose it is.
            remaining: seconds until the caller's deadline; None for none.
            special: see `TextCodec.encode`.

        Raises:
            TandemError: see `run`.
        """
        return await self.run(lambda: self._codec.encode(text, special), client, remaining)

    async def run(self, work: Callable[[], T], client: str, remaining: float | None) -> T:
        """Do other slow work on a request, as prompts are encoded.

        Args:
            work: done in a thread; it lets other threads go on meanwhile.
            client: whose request it is.
            remaining: seconds until the caller's deadline; None for none.

        Raises:
            Exhausted: too much waits already, or the work would wait for too long.
            DeadlineExceeded: its deadline passed before its turn.
            Unavailable: it was closed before the work's turn.
        """
        begun = asyncio.Event()
        task = asyncio.create_task(self._run(work, client, remaining, begun))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            # A task that waits can be cancelled. A thread that works cannot, so it keeps its place.
            if not begun.is_set():
                task.cancel()
            raise

    async def _run(
        self, work: Callable[[], T], client: str, remaining: float | None, begun: asyncio.Event
    ) -> T:
        async with self._queue.admitted(client, 0, remaining):
            begun.set()
            try:
                done = self._threads.submit(work)
            except RuntimeError:
                raise Unavailable("the orchestrator is stopping") from None
            return await asyncio.wrap_future(done)

    def close(self) -> None:
        """Encode nothing more, but what is being encoded; does not wait for that."""
        self._threads.shutdown(wait=False, cancel_futures=True)

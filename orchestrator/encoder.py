"""Prompts to token ids, beside the event loop: a bounded number at once, a bounded number waits."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor

from orchestrator.text import TextCodec
from tandem.errors import Exhausted, Unavailable


class PromptEncoder:
    """Encodes prompts in threads of its own.

    A prompt of half a million characters takes seconds, and other texts go on meanwhile: the
    codec gives the interpreter's lock away while it works.

    Args:
        codec: the target's tokenizer.
        at_once: prompts being encoded.
        waiting: prompts that may wait for that; one more is refused.
    """

    def __init__(self, codec: TextCodec, at_once: int, waiting: int) -> None:
        self._codec = codec
        self._at_once = at_once
        self._limit = at_once + waiting
        self._pending = 0
        self._free = asyncio.Semaphore(at_once)
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="encode")

    @property
    def waiting(self) -> int:
        """Prompts that wait for a thread."""
        return max(self._pending - self._at_once, 0)

    async def encode(self, text: str) -> list[int]:
        """Token ids.

        Raises:
            Exhausted: too many prompts wait already.
            Unavailable: it was closed before the prompt's turn.
        """
        if self._pending >= self._limit:
            raise Exhausted(
                f"{self._pending} prompts are being encoded or wait for it;"
                " try again later, with backoff"
            )
        self._pending += 1
        try:
            # Who waits holds no place in the threads' queue, so whoever gives up leaves nothing.
            await self._free.acquire()
        except BaseException:
            self._pending -= 1
            raise
        loop = asyncio.get_running_loop()

        def end(work: Future[list[int]]) -> None:
            # Also where nobody waits any more: until now the thread was not free.
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._end)

        try:
            work = self._threads.submit(self._codec.encode, text)
        except RuntimeError:
            self._end()  # the next who waits is to hear it too
            raise Unavailable("the model has become another one; try again") from None
        work.add_done_callback(end)
        return await asyncio.wrap_future(work)

    def _end(self) -> None:
        self._pending -= 1
        self._free.release()

    def close(self) -> None:
        """Encode nothing more, but what is being encoded; does not wait for that."""
        self._threads.shutdown(wait=False, cancel_futures=True)

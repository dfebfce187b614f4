"""Prompts to token ids, beside the event loop: a bounded number at once, a bounded number waits."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from orchestrator.text import TextCodec
from tandem.errors import Exhausted


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
        self._limit = at_once + waiting
        self._pending = 0
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="encode")

    async def encode(self, text: str) -> list[int]:
        """Token ids.

        Raises:
            Exhausted: too many prompts wait already.
        """
        if self._pending >= self._limit:
            raise Exhausted(
                f"{self._pending} prompts are being encoded or wait for it;"
                " try again later, with backoff"
            )
        self._pending += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, self._codec.encode, text)
        finally:
            self._pending -= 1

    def close(self) -> None:
        """Encode nothing more. Does not wait for what is being encoded."""
        self._threads.shutdown(wait=False, cancel_futures=True)

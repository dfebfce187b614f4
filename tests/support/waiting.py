"""Waits for what should come. They end by the event; only a hang lets their time run out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

# Longer than a busy machine stands still, and less than pytest gives a test.
HANG_SECONDS = 120.0
_LOOK_SECONDS = 0.005


async def until(condition: Callable[[], Any]) -> Any:
    """Wait until something holds; what came of it.

    Args:
        condition: a function, or a coroutine function; its value counts as true or false.
    """
    async with asyncio.timeout(HANG_SECONDS):
        while True:
            found = condition()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return found
            await asyncio.sleep(_LOOK_SECONDS)


def wait_until(condition: Callable[[], Any]) -> Any:
    """The same in a thread of its own."""
    deadline = time.monotonic() + HANG_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(_LOOK_SECONDS)
    return found

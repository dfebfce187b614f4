"""Waits for expected events. A wait ends with the event; its time only runs out on a hang."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

# Longer than stalls of a busy machine, and shorter than pytest's limit for a test.
HANG_SECONDS = 120.0
_LOOK_SECONDS = 0.005


async def until(condition: Callable[[], Any]) -> Any:
    """Wait until a condition is true; returns its value.

    Args:
        condition: a function or a coroutine function.
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
    """The same, blocking, for a plain function."""
    deadline = time.monotonic() + HANG_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(_LOOK_SECONDS)
    return found

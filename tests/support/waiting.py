"""Waits for expected events. A wait ends with the event; its time only runs out on a hang."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

# Longer than stalls of a busy machine, and shorter than pytest's limit for a test.
HANG_SECONDS = 120.0
# Between two looks: less at first, since a look by gRPC takes a millisecond itself.
_FIRST_SECONDS, _MOST_SECONDS, _LONGER = 0.003, 0.02, 1.2


async def until(condition: Callable[[], Any]) -> Any:
    """Wait until a condition is true; returns its value.

    Args:
        condition: a function or a coroutine function.
    """
    pause = _FIRST_SECONDS
    async with asyncio.timeout(HANG_SECONDS):
        while True:
            found = condition()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return found
            await asyncio.sleep(pause)
            pause = min(_LONGER * pause, _MOST_SECONDS)


def wait_until(condition: Callable[[], Any]) -> Any:
    """The same, blocking, for a plain function."""
    deadline, pause = time.monotonic() + HANG_SECONDS, _FIRST_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(pause)
        pause = min(_LONGER * pause, _MOST_SECONDS)
    return found

"""Slow work beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_daemon_thread(work: Callable[[], T]) -> T:
    """Run slow work beside the event loop, in a thread that does not hold up the exit.

    A pool's thread would: SIGTERM during a load of minutes would wait for its end.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def resolve(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]  # T may itself be optional

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(resolve, result, failure)

    threading.Thread(target=run, name="load", daemon=True).start()
    return await done

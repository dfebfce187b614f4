"""Threads of a service: those of the model, and the one that loads it.

The OpenMP threads of an idle service spin for milliseconds before they sleep, on the very
cores that the next service needs. PASSIVE makes them sleep at once; it has to be in the
environment before torch is imported.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def spin_less() -> None:
    """Let idle OpenMP threads sleep, unless the environment says otherwise."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def use_threads(count: int) -> None:
    """Set the threads of the model; 0 keeps torch's choice, one a core."""
    import torch

    if count:
        torch.set_num_threads(count)


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

"""Many waits whose limits share one timer."""

from __future__ import annotations

import asyncio
import time

import pytest

from tandem.rpc.streams.patience import Patience


async def test_a_wait_that_ends_in_time_gives_its_result() -> None:
    patience = Patience()
    assert await patience.bound(asyncio.sleep(0.01, "done"), 5) == "done"
    patience.close()


async def test_a_wait_that_takes_too_long_is_cancelled() -> None:
    patience, cancelled = Patience(), asyncio.Event()

    async def hang() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    started = time.monotonic()
    with pytest.raises(TimeoutError):
        await patience.bound(hang(), 10)
    assert time.monotonic() - started == pytest.approx(10)
    assert cancelled.is_set()
    assert await patience.bound(asyncio.sleep(0, "again"), 5) == "again", "and the task lives on"
    patience.close()


async def test_a_short_wait_is_not_late_behind_a_long_one() -> None:
    long, short = Patience(), Patience()
    waiting = asyncio.create_task(long.bound(asyncio.sleep(1), 60))
    await asyncio.sleep(0)
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        await short.bound(asyncio.sleep(60), 0.05)
    assert time.monotonic() - started == pytest.approx(0.05)
    assert not waiting.done()
    waiting.cancel()


async def test_a_cancel_from_outside_stays_a_cancel() -> None:
    patience = Patience()
    task = asyncio.create_task(patience.bound(asyncio.sleep(60), 30))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_many_waits_each_end_at_their_own_time() -> None:
    async def one(place: int) -> bool:
        patience = Patience()
        try:
            await patience.bound(asyncio.sleep(0.2), 0.05 if place % 2 else 30)
            return True
        except TimeoutError:
            return False
        finally:
            patience.close()

    ended = await asyncio.gather(*(one(place) for place in range(200)))
    assert ended == [place % 2 == 0 for place in range(200)]

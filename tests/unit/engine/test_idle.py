"""Jobs that nobody waits for: they take no step from those that somebody does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tandem.drafting.drafter import DraftSequence
from tandem.engine.asks import Score, Steps
from tandem.engine.job import Job
from tandem.inference.feed import Feed
from tandem.speculation.request.sampling import Sampling
from tests.support.models.tiny import VOCAB_SIZE, DrafterEngine, make_drafter, random_llama, running
from tests.support.waiting import until

pytestmark = pytest.mark.real_time  # the engine has its thread


class Watched:
    """A drafter's engine whose steps are noted, and held up while it is told to."""

    def __init__(self) -> None:
        self.engine: DrafterEngine = make_drafter(random_llama(2))
        self.steps: list[list[str]] = []
        self.open = asyncio.Event()
        stepper: Any = self.engine._stepper
        step, loop = stepper.step, asyncio.get_running_loop()

        def watched(jobs: Sequence[Job[Any]], meanwhile: Callable[[], None]) -> None:
            self.steps.append(sorted(job.request_id for job in jobs))
            asyncio.run_coroutine_threadsafe(self.open.wait(), loop).result()
            step(jobs, meanwhile)

        stepper.step = watched

    async def sequence(self) -> DraftSequence:
        sequence = DraftSequence([1, 2], Sampling(), VOCAB_SIZE)
        await self.engine.begin(sequence, 64)
        return sequence

    def passes(self, sequence: DraftSequence, count: int, token_id: int = 1) -> Steps[None]:
        for _ in range(count):
            yield Score(self.engine.decoder, Feed(sequence.caches[0], [token_id], 1))


async def test_an_idle_job_waits_for_all_others() -> None:
    watched = Watched()
    engine = watched.engine
    async with running(engine):
        watched.open.set()
        one, other = await watched.sequence(), await watched.sequence()
        watched.steps.clear()
        watched.open.clear()
        idle = engine.run_idle(one, watched.passes(one, 3), "idle")
        await until(lambda: watched.steps)
        wanted = asyncio.create_task(engine.run(other, watched.passes(other, 2), "wanted"))
        await asyncio.sleep(0)
        watched.open.set()
        await wanted
        await idle
    assert watched.steps == [["idle"], ["wanted"], ["wanted"], ["idle"], ["idle"]]


async def test_an_idle_job_ends_when_it_is_cancelled() -> None:
    watched = Watched()
    engine = watched.engine
    async with running(engine):
        watched.open.set()
        one = await watched.sequence()
        watched.steps.clear()
        watched.open.clear()
        idle = engine.run_idle(one, watched.passes(one, 1_000), "idle")
        await until(lambda: watched.steps)
        idle.cancel()
        watched.open.set()
        await engine.run(one, watched.passes(one, 1), "next")
        assert watched.steps == [["idle"], ["next"]]
        assert one.caches[0].length == 4


async def test_an_idle_job_that_fails_ends_nothing_else() -> None:
    watched = Watched()
    engine = watched.engine
    async with running(engine):
        watched.open.set()
        one, other = await watched.sequence(), await watched.sequence()
        idle = engine.run_idle(one, watched.passes(one, 1, token_id=-1), "idle")
        with pytest.raises(asyncio.CancelledError):
            await idle
        await engine.run(other, watched.passes(other, 1))
        await engine.run(one, watched.passes(one, 1))
    stopped = engine.run_idle(one, watched.passes(one, 1))
    assert stopped.cancelled()

"""The engine thread: failures, callers that leave, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest
import torch

from tandem.engine.admission import AdmissionLimits
from tandem.engine.schedule import BatchLimits
from tandem.errors import EngineFailure, Unavailable
from tandem.inference.feed import Feed
from tandem.speculation.draft import Draft
from tests.support.models.engines import (
    CHUNK,
    CONCURRENT,
    VOCAB_SIZE,
    emptied,
    prompt_of,
    target_engine,
    target_sequence,
    watch,
)
from tests.support.models.tiny import make_drafter, random_llama, running, speculate
from tests.support.waiting import HANG_SECONDS, until

pytestmark = pytest.mark.real_time  # the engine has its thread


async def test_a_failing_pass_ends_its_batch_and_nobody_else() -> None:
    # A chunk of one token is one sequence's: two prompts are never in the same batch.
    engine = target_engine(budget=BatchLimits(token_budget=512, prefill_chunk=1))
    faults = ["once"]

    def fail(feeds: Sequence[Feed]) -> None:
        if faults:
            faults.pop()
            raise RuntimeError("as torch does")

    watch(engine, fail)
    async with running(engine):
        first = asyncio.create_task(speculate(None, engine, prompt_of(CHUNK), 5))
        second = asyncio.create_task(speculate(None, engine, prompt_of(CHUNK, seed=1), 5))
        with pytest.raises(EngineFailure, match="see the service's log"):
            await first
        assert len((await second).token_ids) == 5
        assert len((await speculate(None, engine, prompt_of(CHUNK), 5)).token_ids) == 5
        await emptied(engine)
    assert engine.admission.open_sequences == 0


async def test_a_job_that_ends_in_a_failing_step_fails_too() -> None:
    """The prefill after a carry ends without a row of logits, but not without its pass."""
    engine = target_engine()

    def fail(feeds: Sequence[Feed]) -> None:
        raise RuntimeError("as torch does")

    watch(engine, fail)
    sequence = target_sequence([1, 2, 3])
    sequence.carry = object()
    async with running(engine):
        with pytest.raises(EngineFailure):
            await engine.begin(sequence, 0, 10)


async def test_a_lost_device_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = target_engine(places=AdmissionLimits(1, 8, 60))
    lost = asyncio.Event()
    engine.on_device_lost = lost.set
    sequence, waiting = target_sequence([1, 2]), target_sequence([3])

    def fail(feeds: Sequence[Feed]) -> None:
        raise RuntimeError("CUDA error")

    async with running(engine):
        await engine.begin(sequence, 0, 50)
        queued = asyncio.create_task(engine.begin(waiting, 0, 50))
        await asyncio.sleep(0)
        watch(engine, fail)
        monkeypatch.setattr(torch, "ones", lambda *_, **__: fail([]))
        with pytest.raises(EngineFailure):
            await engine.verify(sequence, 1, Draft.certain(()))
        async with asyncio.timeout(HANG_SECONDS):
            await lost.wait()
            with pytest.raises(Unavailable, match="device is gone"):
                await queued
        with pytest.raises(Unavailable, match="device is gone"):
            await engine.verify(sequence, 2, Draft.certain(()))
        with pytest.raises(Unavailable, match="device is gone"):
            await engine.begin(target_sequence([1]), 0, 10)


async def test_stopping_fails_what_waits() -> None:
    engine = target_engine(
        places=AdmissionLimits(2, 8, 60), budget=BatchLimits(token_budget=512, prefill_chunk=1)
    )
    async with running(engine):
        tasks = [
            asyncio.create_task(engine.begin(target_sequence(prompt_of(1000)), 0, 1100))
            for _ in range(4)
        ]
        await until(lambda: engine.decoder.forward_passes > 3)
        assert engine.admission.open_sequences == 2
        await asyncio.to_thread(engine.stop)
        for task in tasks:
            with pytest.raises(Unavailable, match="stopping"):
                async with asyncio.timeout(HANG_SECONDS):
                    await task
        with pytest.raises(Unavailable, match="stopping"):
            await engine.begin(target_sequence([1]), 0, 10)


async def test_whoever_leaves_is_gone_after_the_step() -> None:
    engine = target_engine(budget=BatchLimits(token_budget=512, prefill_chunk=1))
    async with running(engine):
        leaving = asyncio.create_task(speculate(None, engine, prompt_of(1000), 5))
        await until(lambda: engine.decoder.forward_passes > 3)
        leaving.cancel()
        await asyncio.wait([leaving])
        await emptied(engine)
        passes = engine.decoder.forward_passes
        assert passes < 1000
        await speculate(None, engine, [1, 2], 2)
    assert engine.decoder.forward_passes == passes + 3


async def test_sequences_come_and_go_without_a_trace() -> None:
    """Also those that are given up at any moment."""
    drafter, target = make_drafter(random_llama(2, VOCAB_SIZE)), target_engine()
    rng = random.Random(0)

    def tensors() -> list[tuple[int, tuple[int, ...]]]:
        pools = (drafter.decoder.pool, target.decoder.pool)
        states = [s for pool in pools for s in (*pool.keys, *pool.values)]
        return [(state.data_ptr(), tuple(state.shape)) for state in states]

    async def one(i: int) -> None:
        text = speculate(drafter, target, prompt_of(rng.randint(1, 20), i), 3, gamma=2)
        if i % 10:
            await text
            return
        given_up = asyncio.create_task(text)
        await asyncio.sleep(rng.random() / 500)
        given_up.cancel()
        await asyncio.wait([given_up])

    before = tensors()
    async with running(drafter, target):
        for first in range(0, 600, CONCURRENT):
            await asyncio.gather(*(one(i) for i in range(first, first + CONCURRENT)))
        for engine in (drafter, target):
            await emptied(engine)
            pool = engine.decoder.pool
            assert pool.reserve(pool.positions) is not None, "in one piece"
            assert engine.admission.open_sequences == 0
    assert tensors() == before

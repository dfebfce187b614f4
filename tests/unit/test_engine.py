"""The engine thread: batches, fairness, failures, and what is left behind."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.errors import EngineFailure, StartupError, Unavailable
from tandem.inference.admission import AdmissionLimits
from tandem.inference.batch import Feed
from tandem.inference.decoder import Decoder
from tandem.inference.engine import BatchLimits, Engine
from tandem.speculation.draft import Draft
from tandem.speculation.sampling import Sampling
from target_svc.engine import TargetEngine, TargetSequence, VerifyJob
from target_svc.verifiers import VERIFIERS
from tests.tiny import Text, make_drafter, make_target, random_llama, running, speculate

VOCAB_SIZE = 31
CONCURRENT = 16
CHUNK = 16


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


def target_engine(**options: Any) -> TargetEngine:
    return make_target(random_llama(1, VOCAB_SIZE), **options)


def target_sequence(prompt: Sequence[int]) -> TargetSequence:
    return TargetSequence(list(prompt), Sampling(), VERIFIERS["token"], None)


def watch(engine: Engine[Any, Any], before: Callable[[Sequence[Feed]], None]) -> None:
    """Call `before` in the engine thread ahead of each forward pass."""
    forward = engine.decoder.forward

    def watched(feeds: Sequence[Feed]) -> Tensor:
        before(feeds)
        return forward(feeds)

    engine.decoder.forward = watched  # type: ignore[method-assign]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  # it is about the engine's thread
            await asyncio.sleep(0.001)


async def emptied(engine: Engine[Any, Any]) -> None:
    """Wait until all memory is given back, which happens between two steps."""
    pool = engine.decoder.pool
    await until(lambda: pool.free_positions == pool.positions)


SAMPLED = (
    Sampling(seed=7),
    Sampling(temperature=0.7, top_p=0.9, seed=8),
    Sampling(temperature=1.3, top_k=5, min_p=0.05, seed=9),
    Sampling(temperature=0.3, seed=10),
)


async def mixed_texts(
    together: bool, samplings: Sequence[Sampling] = SAMPLED
) -> tuple[list[Text], int, int]:
    """Sequences of all verifiers and samplings; with the passes of the drafter and the target."""
    rules = ["token", "block", "greedy_block"]
    drafter, target = make_drafter(random_llama(2, VOCAB_SIZE)), target_engine()
    if together:
        # As in service, a pass takes longer than the event loop between two of them.
        for engine in (drafter, target):
            watch(engine, lambda _: time.sleep(0.002))

    async def one(i: int) -> Text:
        return await speculate(
            drafter,
            target,
            prompt_of(5 + 3 * i, seed=i),
            20,
            rule=rules[i % len(rules)],
            sampling=samplings[i % len(samplings)],
        )

    async with running(drafter, target):
        if together:
            texts = await asyncio.gather(*(one(i) for i in range(CONCURRENT)))
        else:
            texts = [await one(i) for i in range(CONCURRENT)]
        for engine in (drafter, target):
            await emptied(engine)
    return texts, drafter.decoder.forward_passes, target.decoder.forward_passes


async def test_a_batch_changes_no_token_and_saves_passes() -> None:
    alone, drafter_alone, target_alone = await mixed_texts(together=False)
    batched, drafter_batched, target_batched = await mixed_texts(together=True)
    assert [text.token_ids for text in batched] == [text.token_ids for text in alone]
    rounds = sum(text.rounds for text in batched)
    assert target_alone > rounds
    assert target_batched < rounds / 2
    assert drafter_batched < drafter_alone / 2
    assert 0 < sum(text.accepted for text in batched) < sum(text.drafted for text in batched)


async def test_greedy_sequences_draft_beside_sampled_ones() -> None:
    samplings = [Sampling(temperature=0), *SAMPLED]
    alone, _, _ = await mixed_texts(together=False, samplings=samplings)
    batched, _, _ = await mixed_texts(together=True, samplings=samplings)
    assert [text.token_ids for text in batched] == [text.token_ids for text in alone]


async def test_a_long_prompt_holds_nobody_up_by_more_than_a_chunk() -> None:
    engine = target_engine(budget=BatchLimits(token_budget=512, prefill_chunk=CHUNK))
    steps: list[list[int]] = []
    left_out: list[int] = []
    select = engine._select

    def selecting(jobs: Sequence[VerifyJob]) -> list[VerifyJob]:
        selected = select(jobs)
        left_out.extend(id(job) for job in jobs if not job.prompt and job not in selected)
        steps.append([job.chunk if job.prompt else 0 for job in selected])
        return selected

    engine._select = selecting  # type: ignore[method-assign]
    async with running(engine):
        runners = [asyncio.create_task(speculate(None, engine, [1, 2], 120)) for _ in range(4)]
        await until(lambda: len(steps) > 10)
        prompt = prompt_of(400)
        await speculate(None, engine, prompt, 1)
        await asyncio.gather(*runners)
    chunks = [sum(step) for step in steps]
    assert sum(chunks) == len(prompt) + 4 * len([1, 2])
    assert max(chunks) <= CHUNK
    assert not left_out, "who is there runs, whatever prompt comes"
    assert any(max(step) > len([1, 2]) and 0 in step for step in steps), "beside the prompt"


async def test_a_prompt_takes_more_at_once_where_nobody_has_to_wait() -> None:
    limits = BatchLimits(token_budget=512, prefill_chunk=CHUNK, chunk_alone=2 * CHUNK)
    engine = target_engine(budget=limits)
    fed: list[int] = []
    watch(engine, lambda feeds: fed.append(max(len(feed.token_ids) for feed in feeds)))
    prompt = prompt_of(10 * CHUNK)
    async with running(engine):
        await speculate(None, engine, prompt, 1)
        assert fed == [2 * CHUNK] * 5
        fed.clear()
        other = target_sequence([1])
        await engine.open(other, 0, 10)
        await speculate(None, engine, prompt, 1)
        assert fed == [1, *[CHUNK] * 10]
        engine.release(other)


@pytest.mark.parametrize("gather", [0.0, 1.0])
async def test_those_who_miss_a_pass_by_little_are_waited_for(gather: float) -> None:
    limits = BatchLimits(token_budget=512, prefill_chunk=CHUNK, gather=gather)
    engine = target_engine(budget=limits)
    watch(engine, lambda _: time.sleep(0.02))
    async with running(engine):
        first = asyncio.create_task(speculate(None, engine, [1, 2], 40))
        await until(lambda: engine.decoder.forward_passes > 5)
        second = await speculate(None, engine, [3], 30)
        rounds = (await first).rounds + second.rounds
    together = 1 - engine.decoder.forward_passes / rounds
    assert together > 0.3 if gather else together < 0.2


async def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    engine = target_engine(budget=BatchLimits(token_budget=512, prefill_chunk=CHUNK))
    steps: list[list[int]] = []
    watch(engine, lambda feeds: steps.append([len(feed.token_ids) for feed in feeds]))
    async with running(engine):
        long = asyncio.create_task(speculate(None, engine, prompt_of(400), 1))
        await until(lambda: len(steps) > 2)
        await speculate(None, engine, prompt_of(CHUNK, seed=1), 1)
        assert not long.done()
        await long
    # Half of each chunk is the long one's.
    assert [step for step in steps if len(step) == 2] == [[CHUNK // 2, CHUNK // 2]] * 2
    assert max(map(sum, steps)) <= CHUNK


async def test_a_small_token_budget_starves_nobody() -> None:
    engine = target_engine(budget=BatchLimits(token_budget=1, prefill_chunk=CHUNK))
    fed: list[int] = []
    watch(engine, lambda feeds: fed.append(sum(len(f.token_ids) for f in feeds)))
    async with running(engine):
        texts = await asyncio.gather(*(speculate(None, engine, [1], 20) for _ in range(5)))
    assert [len(text.token_ids) for text in texts] == [20] * 5
    assert max(fed) <= 1 + CHUNK


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
    """The prefill behind a carry ends without a row of logits, but not without its pass."""
    engine = target_engine()

    def fail(feeds: Sequence[Feed]) -> None:
        raise RuntimeError("as torch does")

    watch(engine, fail)
    sequence = target_sequence([1, 2, 3])
    sequence.carry = object()
    async with running(engine):
        with pytest.raises(EngineFailure):
            await engine.open(sequence, 0, 10)


async def test_a_lost_device_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = target_engine(places=AdmissionLimits(1, 8, 60))
    lost = asyncio.Event()
    engine.on_device_lost = lost.set
    sequence, waiting = target_sequence([1, 2]), target_sequence([3])

    def fail(feeds: Sequence[Feed]) -> None:
        raise RuntimeError("CUDA error")

    async with running(engine):
        await engine.open(sequence, 0, 50)
        queued = asyncio.create_task(engine.open(waiting, 0, 50))
        await asyncio.sleep(0)
        watch(engine, fail)
        monkeypatch.setattr(torch, "ones", lambda *_, **__: fail([]))
        with pytest.raises(EngineFailure):
            await engine.verify(sequence, 1, Draft.none())
        async with asyncio.timeout(10):
            await lost.wait()
            with pytest.raises(Unavailable, match="device is gone"):
                await queued
        with pytest.raises(Unavailable, match="device is gone"):
            await engine.verify(sequence, 2, Draft.none())
        with pytest.raises(Unavailable, match="device is gone"):
            await engine.open(target_sequence([1]), 0, 10)


async def test_stopping_fails_what_waits() -> None:
    engine = target_engine(
        places=AdmissionLimits(2, 8, 60), budget=BatchLimits(token_budget=512, prefill_chunk=1)
    )
    async with running(engine):
        tasks = [
            asyncio.create_task(engine.open(target_sequence(prompt_of(1000)), 0, 1100))
            for _ in range(4)
        ]
        await until(lambda: engine.decoder.forward_passes > 3)
        assert engine.admission.open_sequences == 2
        await asyncio.to_thread(engine.stop)
        for task in tasks:
            with pytest.raises(Unavailable, match="stopping"):
                async with asyncio.timeout(10):
                    await task
        with pytest.raises(Unavailable, match="stopping"):
            await engine.open(target_sequence([1]), 0, 10)


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
        for first in range(0, 2000, CONCURRENT):
            await asyncio.gather(*(one(i) for i in range(first, first + CONCURRENT)))
        for engine in (drafter, target):
            await emptied(engine)
            pool = engine.decoder.pool
            assert pool.reserve(pool.positions) is not None, "in one piece"
            assert engine.admission.open_sequences == 0
    assert tensors() == before


def test_a_cache_that_memory_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.inference.support.free_memory", lambda _: 2**30)
    numbers = r"10000000 tokens takes 1\.2 GiB, cpu has 1\.0 GiB free; lower CACHE_TOKENS"
    with pytest.raises(StartupError, match=numbers):
        Decoder(random_llama(1), "large", cache_tokens=10_000_000)


def test_the_cache_is_sized_to_half_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # One layer of two heads of 8, keys and values, float32: 128 bytes a position.
    monkeypatch.setattr("tandem.inference.support.free_memory", lambda _: 2 * 128 * 50)
    assert Decoder(random_llama(1), "small", at_most=1000).pool.positions == 50
    assert Decoder(random_llama(1), "small", at_most=20).pool.positions == 20

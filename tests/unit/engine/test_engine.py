"""The engine thread: batches, and which work waits for which."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tandem.engine import engine as engine_module
from tandem.engine import schedule
from tandem.engine.job import Job
from tandem.engine.schedule import BatchLimits
from tandem.engine.stepper import Stepper
from tandem.inference.feed import Feed
from tandem.profile import Profile
from tandem.speculation.draft import Draft
from tandem.speculation.request.sampling import Sampling
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
from tests.support.models.tiny import Text, make_drafter, random_llama, running, speculate
from tests.support.waiting import HANG_SECONDS, until

pytestmark = pytest.mark.real_time  # the engine has its thread

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


async def test_a_long_prompt_holds_nobody_up_by_more_than_a_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = target_engine(budget=BatchLimits(token_budget=512, prefill_chunk=CHUNK))
    steps: list[list[int]] = []
    left_out: list[int] = []

    def selecting(jobs: Sequence[Job[Any]], *state: Any) -> list[Job[Any]]:
        selected = schedule.select(jobs, *state)
        left_out.extend(id(job) for job in jobs if not job.opening and job not in selected)
        steps.append([job.chunk if job.opening else 0 for job in selected])
        return selected

    monkeypatch.setattr(engine_module, "select", selecting)
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
    # A row takes a nanosecond, and a pass 21 of them in any case: 3/4 of that is a chunk. Ten times
    # as many are 213, and one whole tile.
    profile = Profile([(1, 1, 4 / 3 * CHUNK), (1, 17, 4 / 3 * CHUNK + 16)])
    engine = target_engine(budget=BatchLimits(prefill_share=0.75, profile=profile))
    fed: list[int] = []
    watch(engine, lambda feeds: fed.append(max(len(feed.token_ids) for feed in feeds)))
    prompt = prompt_of(20 * CHUNK)
    async with running(engine):
        await speculate(None, engine, prompt, 1)
        assert fed == [128, 128, 20 * CHUNK - 256]
        fed.clear()
        other = target_sequence([1])
        await engine.begin(other, 0, 10)
        await speculate(None, engine, prompt, 1)
        assert fed == [1, *[CHUNK] * 20]
        fed.clear()
        # Another pass is found: twice as many rows take as long.
        engine.expect(Profile([(1, 1, 4 / 3 * CHUNK), (1, 17, 4 / 3 * CHUNK + 8)]))
        await speculate(None, engine, prompt_of(40 * CHUNK), 1)  # one step does not complete it
        assert fed == [2 * CHUNK] * 20
        engine.release(other)


@pytest.mark.parametrize("gather", [0.0, 1.0])
async def test_a_pass_waits_for_who_should_be_back(gather: float) -> None:
    engine = target_engine(budget=BatchLimits(512, prefill_chunk=CHUNK, gather=gather))
    here, away = target_sequence([1]), target_sequence([2])
    async with running(engine):
        for sequence in (here, away):
            await engine.begin(sequence, 0, 10)
        # As if passes took long, and this one were away for seconds as a rule.
        engine._step_seconds, now = 30.0, time.perf_counter()
        engine._gathering.come(away, now)
        engine._gathering.leave(away, now - 20)
        engine._gathering.come(away, now - 10)
        engine._gathering.leave(away, now)
        before = engine.decoder.forward_passes
        waiting = asyncio.create_task(engine.verify(here, 1, Draft.certain(())))
        if gather:
            await asyncio.sleep(0.05)
            assert engine.decoder.forward_passes == before
            await engine.verify(away, 1, Draft.certain(()))
        await asyncio.wait_for(waiting, HANG_SECONDS)
        assert engine.decoder.forward_passes == before + 1
        for sequence in (here, away):
            engine.release(sequence)


async def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    engine = target_engine(budget=BatchLimits(token_budget=512, prefill_chunk=CHUNK))
    steps: list[list[int]] = []
    met = threading.Event()

    def before(feeds: Sequence[Feed]) -> None:
        steps.append([len(feed.token_ids) for feed in feeds])
        if len(steps) == 3:
            # However busy the machine is, they meet in the middle of the long prompt.
            assert met.wait(30)

    watch(engine, before)
    async with running(engine):
        long = asyncio.create_task(speculate(None, engine, prompt_of(400), 1))
        await until(lambda: len(steps) == 3)
        short = asyncio.create_task(speculate(None, engine, prompt_of(CHUNK, seed=1), 1))
        await until(lambda: engine.admission.open_sequences == 2)
        met.set()
        await asyncio.gather(long, short)
    # Half of each chunk is the long one's while there are two.
    alone, both = [CHUNK], [CHUNK // 2, CHUNK // 2]
    assert steps == [alone] * 3 + [both] * 2 + [alone] * (400 // CHUNK - 4)


async def test_a_small_token_budget_starves_nobody() -> None:
    engine = target_engine(budget=BatchLimits(token_budget=1, prefill_chunk=CHUNK))
    fed: list[int] = []
    watch(engine, lambda feeds: fed.append(sum(len(f.token_ids) for f in feeds)))
    async with running(engine):
        texts = await asyncio.gather(*(speculate(None, engine, [1], 20) for _ in range(5)))
    assert [len(text.token_ids) for text in texts] == [20] * 5
    assert max(fed) <= 1 + CHUNK


@pytest.mark.parametrize("elsewhere", [False, True])
def test_numbers_wake_no_threads_beside_those_of_another_runtime(
    elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    Stepper(torch.device("cpu"), lambda: elsewhere).step([])
    assert told == ([1] if elsewhere else [])

"""Sequences that hold less memory than they were promised: they grow, or the youngest goes."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import Any

import pytest

from drafter_svc.settings import DrafterSettings
from tandem.drafting.drafter import DraftSequence
from tandem.drafting.methods import METHODS
from tandem.engine.admission import AdmissionLimits, RoomWanted
from tandem.engine.asks import Score
from tandem.engine.growing import GrowingSequences
from tandem.engine.job import Job
from tandem.engine.schedule import BatchLimits
from tandem.errors import EngineFailure, OutOfRoom
from tandem.inference.choice.choose import EngineName
from tandem.inference.feed import Feed
from tandem.inference.kv.extents import Extents, SequenceCache
from tandem.inference.kv.pool import KVPool
from tandem.speculation.draft import Draft
from tandem.speculation.request.sampling import Sampling
from tandem.speculation.tree import LONGEST_DRAFT
from tests.support.laws.suited import rules_for
from tests.support.models.engines import target_sequence
from tests.support.models.tiny import (
    VOCAB_SIZE,
    TargetEngine,
    Text,
    make_drafter,
    make_method,
    make_target,
    random_llama,
    running,
    speculate,
)

OTHERS = pytest.mark.campaign(
    "a text that is given back is the same text, with every rule",
    "each method with one rule, sampled (this file)",
)

pytestmark = pytest.mark.real_time  # the engine has its thread

PROMPT = [1, 2, 3]
SAMPLED, GREEDY = Sampling(temperature=0.8, seed=5), Sampling(temperature=0)
PLAIN = Draft.certain(())
# Each method that has something of its own to do where a text goes on.
METHODS_HERE = ("model", "tree", "chains", "forest", "lookup", "eagle", "hydra")


def overcommitted(positions: int, times: float = 4, engine: EngineName = "torch") -> TargetEngine:
    places = AdmissionLimits(64, 64, 60, overcommit=times)
    budget = BatchLimits(token_budget=512, prefill_chunk=16)
    model = random_llama(1)
    return make_target(model, cache_tokens=positions, places=places, budget=budget, engine=engine)


def cases() -> list[Any]:
    found = []
    for name in METHODS_HERE:
        movable = [r for r in rules_for(METHODS[name].drafter) if not r.needs_every_draft]
        for i, rule in enumerate(movable):
            for sampling in (SAMPLED, GREEDY):
                first = i == 0 and sampling is SAMPLED
                found.append(
                    pytest.param(*(name, rule.name, sampling), marks=() if first else OTHERS)
                )
    return found


def give_back_at_random(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """Whatever is to be computed, there is no room for it as often as that; but for what a draft
    needs once it is begun, which was looked for before."""
    lacking, chance = GrowingSequences._lacking, random.Random(3)

    def now_and_then(self: GrowingSequences, job: Job[object]) -> object | None:
        if job.drafting or chance.random() >= share:
            return lacking(self, job)
        pool: object = job.sequence.caches[0].pool
        return pool

    monkeypatch.setattr(GrowingSequences, "_lacking", now_and_then)


@pytest.mark.parametrize(("name", "rule", "sampling"), cases())
async def test_a_text_that_is_given_back_is_the_same_text(
    name: str, rule: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = make_method(name, DrafterSettings(max_nodes=6, chains=2))
    places = AdmissionLimits(64, 64, 60, overcommit=4)
    target = make_target(random_llama(1), states_of="1", places=places)
    budget = 6 if drafter.drafter.traits.largest_tree else 0

    async def said(prompt: list[int], **how: Any) -> Text:
        return await speculate(
            *(drafter, target, prompt, 40),
            gamma=3,
            budget=budget,
            rule=rule,
            sampling=sampling,
            **how,
        )

    prompt = PROMPT * 20  # several chunks
    async with running(target, drafter):
        stayed = await said(prompt, grows=True)
        assert not stayed.given_back
        give_back_at_random(monkeypatch, 0.4)
        moved = await said(prompt, grows=True)
    assert moved.given_back > 5
    assert moved.token_ids == stayed.token_ids
    assert moved.accepted == stayed.accepted
    assert target.decoder.free_positions == target.decoder.positions


@pytest.mark.parametrize("engine", ["torch", "openvino"])
async def test_texts_that_do_not_fit_together_all_end_as_they_would_alone(
    engine: EngineName,
) -> None:
    if engine == "openvino":
        pytest.importorskip("openvino")
    prompts = [[*PROMPT, text % 5] for text in range(6)]
    alone, target = overcommitted(1024, 1, engine), overcommitted(256, 4, engine)
    async with running(alone, target):
        expected = [await speculate(None, alone, one, 120, sampling=SAMPLED) for one in prompts]
        texts = await asyncio.gather(
            *(
                speculate(None, target, one, 120, sampling=SAMPLED, grows=True, salt="")
                for one in prompts
            )
        )
    assert [text.token_ids for text in texts] == [text.token_ids for text in expected]
    assert sum(text.given_back for text in texts)
    assert not texts[0].given_back, "the oldest always goes on"
    assert target.decoder.free_positions == target.decoder.positions
    assert not target.admission.open_sequences
    assert not target.admission.promised


async def test_the_youngest_is_given_back_though_it_has_no_job() -> None:
    target = overcommitted(256)
    counts: list[int] = []
    target.on_given_back = counts.append
    async with running(target):
        in_full, old, young = (target_sequence([text]) for text in range(3))
        await target.begin(in_full, 0, 100)
        await target.begin(old, 0, 200, 1)
        await target.begin(young, 0, 200, 1)
        for round_ in range(1, 180):
            await target.verify(old, round_, PLAIN)
            if counts:
                break
        assert counts == [1]
        assert old.caches[0].capacity > 64
        with pytest.raises(OutOfRoom, match="older sequences needed the memory"):
            await target.verify(young, 1, PLAIN)
        await target.verify(in_full, 1, PLAIN)
        # Its slot is free once it is left, and its memory is not given back twice.
        assert target.admission.open_sequences == 3
        for sequence in (young, in_full, old):
            target.release(sequence)
    assert target.decoder.free_positions == 256


async def test_who_needs_room_and_is_the_youngest_is_given_back_itself() -> None:
    target = overcommitted(256)
    async with running(target):
        old, young = target_sequence([1]), target_sequence([2])
        await target.begin(old, 0, 130)
        await target.begin(young, 0, 200, 1)
        rounds = 0
        with suppress(OutOfRoom):
            while young.length < 200:
                await target.verify(young, rounds + 1, PLAIN)
                rounds += 1
        assert 100 < rounds < 130
        await target.verify(old, 1, PLAIN)
        for sequence in (young, old):
            target.release(sequence)
    assert target.decoder.free_positions == 256


async def test_a_draft_that_nobody_waits_for_takes_no_texts_room() -> None:
    target = overcommitted(256)
    async with running(target):
        old, young = target_sequence([1]), target_sequence([2])
        await target.begin(old, 0, 250, 1)
        await target.begin(young, 0, 190, 150)  # 100 more would fit, and leave it none
        old.token_ids += [1] * 200

        def prepared() -> Any:
            yield Score(target.decoder, Feed(old.caches[0], [1] * 100, 1))

        idle = target.run_idle(old, prepared())
        with pytest.raises(asyncio.CancelledError):
            await idle
        await target.verify(young, 1, PLAIN)
        await target.verify(old, 1, PLAIN)
        for sequence in (young, old):
            target.release(sequence)


async def test_where_no_room_can_be_made_a_text_ends_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = overcommitted(256)
    async with running(target):
        one, other = target_sequence([1]), target_sequence([2])
        await target.begin(one, 0, 100, 1)
        await target.begin(other, 0, 100)

        def fail(*of: Any) -> bool:
            raise RuntimeError("out of memory")

        monkeypatch.setattr(GrowingSequences, "_lacking", fail)
        with pytest.raises(EngineFailure):
            await target.verify(one, 1, PLAIN)
        monkeypatch.undo()
        await target.verify(other, 1, PLAIN)
        for sequence in (one, other):
            target.release(sequence)
    assert target.decoder.free_positions == 256


async def test_a_draft_has_its_room_before_its_first_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its later passes none is looked for, so that what was drawn decides no draft's end."""
    places = AdmissionLimits(64, 64, 60, overcommit=4)
    drafter = make_drafter(random_llama(2), places=places)
    sequence = DraftSequence([1, 2, 3], SAMPLED, VOCAB_SIZE)
    grown: list[int] = []
    grow = Extents.grow

    def noted(pool: Extents, cache: SequenceCache, capacity: int) -> bool:
        grown.append(capacity)
        return grow(pool, cache, capacity)

    async with running(drafter):
        await drafter.open(sequence, drafter.drafter.open(sequence), RoomWanted(100, least=3))
        monkeypatch.setattr(Extents, "grow", noted)
        monkeypatch.setattr(Extents, "_extend", lambda pool, cache, capacity: False)
        await drafter.draft(sequence, 1, [4], 8)
        assert grown == [3 + 1 + LONGEST_DRAFT]
        drafter.release(sequence)


def test_who_drafts_is_not_given_back_for_another() -> None:
    sequences = [target_sequence([number]) for number in range(3)]
    one, other = KVPool(10), KVPool(10)
    for sequence, pool in zip(sequences, (one, one, other), strict=True):
        sequence.caches = [SequenceCache(pool, 0, 1)]
    growing = GrowingSequences(lambda sequence: None)
    for sequence in sequences:
        growing.begin(sequence)
    oldest: Job[object] = Job(sequences[0], iter(()))  # type: ignore[arg-type]
    # What the youngest holds is of another pool.
    assert growing._youngest(oldest, one, ()) is sequences[1]
    assert growing._youngest(oldest, other, ()) is sequences[2]
    assert growing._youngest(oldest, one, {sequences[1]}) is None
    own: Job[object] = Job(sequences[2], iter(()))  # type: ignore[arg-type]
    assert growing._youngest(own, other, {sequences[1]}) is sequences[2]


def test_a_move_that_fails_leaves_a_text_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = KVPool(300)
    text, behind = pool.reserve(200, 100), pool.reserve(10)
    assert text is not None
    assert behind is not None
    text.length = 90

    def fail(*of: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(KVPool, "move", fail)
    with pytest.raises(RuntimeError):
        pool.grow(text, 150)
    assert (text.start, text.capacity, pool.free_positions) == (0, 100, 190)
    assert pool.reserve(150) is not None
    assert pool.reserve(50) is None

"""A text is the same whether its prompt was computed for another one or not; and nothing is found
but what was emitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from drafter_svc.settings import DrafterSettings
from tandem.drafting.ahead.forks import ForkedCache
from tandem.drafting.methods import METHODS
from tandem.inference.choice.choose import EngineName
from tandem.inference.feed import Feed
from tandem.inference.kv.blocks import Blocks
from tandem.inference.kv.extents import SequenceCache
from tandem.inference.kv.pool import KVPool
from tandem.speculation.prepared_outcome import PreparedOutcome
from tandem.speculation.request.sampling import Sampling
from tests.support.decoders import decoder_over
from tests.support.laws.suited import rules_for
from tests.support.models.tiny import (
    Text,
    make_drafter,
    make_method,
    make_target,
    random_llama,
    running,
    speculate,
)

OTHERS = pytest.mark.campaign(
    "warm texts of every rule are those of cold ones",
    "each method that computes with one rule, sampled (this file)",
)

pytestmark = pytest.mark.real_time  # the engine has its thread

SAMPLED, GREEDY = Sampling(temperature=0.8, seed=5), Sampling(temperature=0)
PROMPT = [1, 2, 3, 0, 4] * 7
# Positions of a block: small, so that drafts cross the end of one.
BLOCK = 2

DECODERS, HEADS = ("model", "tree", "chains", "forest", "cascade", "horizontal"), ("eagle", "hydra")


def cases() -> list[Any]:
    found = []
    for name in DECODERS + HEADS:
        for i, rule in enumerate(rules_for(METHODS[name].drafter)):
            for sampling in (SAMPLED, GREEDY):
                first = (i == 0 and sampling is SAMPLED) or (name, i) == ("model", 0)
                found.append(
                    pytest.param(*(name, rule.name, sampling), marks=() if first else OTHERS)
                )
    return found


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """All that others were let find."""
    found: list[list[int]] = []
    own = SequenceCache.publish

    def noted(cache: SequenceCache, token_ids: Sequence[int], end: int) -> None:
        found.append(list(token_ids[: min(end, cache.length)]))
        own(cache, token_ids, end)

    monkeypatch.setattr(SequenceCache, "publish", noted)
    return found


@pytest.mark.parametrize(("name", "rule", "sampling"), cases())
async def test_warm_texts_are_those_of_cold_ones(
    name: str, rule: str, sampling: Sampling, published: list[list[int]]
) -> None:
    drafter = make_method(name, DrafterSettings(max_nodes=6, chains=2))
    target = make_target(random_llama(1), states_of="1")
    for engine in (target, drafter):
        if engine.decoder.pool is not None:
            engine.decoder.pool.blocks = Blocks(BLOCK)
    budget = 6 if drafter.drafter.traits.largest_tree else 0

    async def said(prompt: Sequence[int], salt: str | None) -> Text:
        return await speculate(
            *(drafter, target, prompt, 24),
            gamma=3,
            budget=budget,
            rule=rule,
            sampling=sampling,
            salt=salt,
        )

    async with running(target, drafter):
        cold = await said(PROMPT, None)
        assert cold.found == (0, 0)
        first, second = await said(PROMPT, ""), await said(PROMPT, "")
        turn = [*PROMPT, *cold.token_ids, 1, 2]
        expected, answer = await said(turn, None), await said(turn, "")
    assert first.found == (0, 0)
    assert first.token_ids == second.token_ids == cold.token_ids
    assert answer.token_ids == expected.token_ids
    # The last token is computed, and what ends a text is told to a drafter no more.
    assert second.found[0] == len(PROMPT) - 1
    assert answer.found[0] >= len(turn) - 2 * BLOCK - 1
    if name in DECODERS:
        assert second.found[1] == len(PROMPT) - 1
        # A last round of four tokens and a plain one after it, two new ones, the last token that
        # it was told, and one that fills no block.
        assert answer.found[1] >= len(turn) - (4 + 1 + 2 + 1 + BLOCK - 1)
    emitted = [[*PROMPT, *cold.token_ids], [*turn, *expected.token_ids]]
    assert len(published) > 20
    for text in published:
        assert any(whole[: len(text)] == text[: len(whole)] for whole in emitted), "not emitted"


@pytest.mark.parametrize(
    "recipe",
    [
        'method = "cascade"\n[inner]\nmethod = "model"',
        'method = "horizontal"\ntokens = [2]\n[[parts]]\nmethod = "lookup"\n'
        '[[parts]]\nmethod = "model"',
    ],
)
async def test_what_a_part_assumes_is_not_found(
    recipe: str, tmp_path: Path, published: list[list[int]]
) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(recipe)
    drafter = make_method("", DrafterSettings(recipe=str(file)))
    target = make_target(random_llama(1))
    for model in drafter.admission._pools:
        model.pool.blocks = Blocks(BLOCK)  # type: ignore[attr-defined]
    async with running(target, drafter):
        text = await speculate(drafter, target, PROMPT, 60, sampling=SAMPLED, salt="")
    emitted = [*PROMPT, *text.token_ids]
    assert len(published) > 20
    for one in published:
        assert emitted[: len(one)] == one[: len(emitted)], "not emitted"


def test_what_was_prepared_is_found_once_its_outcome_came() -> None:
    pool, text = KVPool(32), [1] * 5
    pool.blocks = Blocks(BLOCK)
    cache = pool.reserve(16)
    assert cache is not None
    cache.adopt((), "")
    cache.grow(text)
    fork = ForkedCache.of(cache, 4, text[4:])
    fork.publish(text, 4)
    assert not cache.blocks
    fork.adopt()
    assert len(cache.blocks) == 2


@pytest.mark.parametrize("name", ["model", "forest"])
async def test_a_text_is_found_though_its_drafts_were_prepared(
    name: str, published: list[list[int]]
) -> None:
    drafter, target = make_method(name, DrafterSettings(max_nodes=6)), make_target(random_llama(1))
    drafter.ahead_nodes = 60
    for model in drafter.admission._pools:
        model.pool.blocks = Blocks(BLOCK)  # type: ignore[attr-defined]
    async with running(target, drafter):
        texts = []
        for prompt in (PROMPT, PROMPT[:-1]):
            text = await speculate(
                drafter, target, prompt, 60, gamma=3, budget=6, sampling=SAMPLED, salt=""
            )
            texts.append(text)
        turn = [*PROMPT, *texts[0].token_ids, 1]
        answer = await speculate(drafter, target, turn, 4, sampling=GREEDY, salt="")
    assert PreparedOutcome.HIT in drafter.came
    assert PreparedOutcome.MISS in drafter.came
    assert answer.found[1] >= len(turn) - 8
    emitted = [[*PROMPT, *texts[0].token_ids], [*PROMPT[:-1], *texts[1].token_ids]]
    emitted.append([*turn, *answer.token_ids])
    for one in published:
        assert any(whole[: len(one)] == one[: len(whole)] for whole in emitted), "not emitted"


@pytest.mark.parametrize("engine", ["torch", "openvino"])
async def test_texts_are_the_same_with_each_back_end(engine: EngineName) -> None:
    if engine == "openvino":
        pytest.importorskip("openvino")
    prompt = PROMPT * 2
    target = make_target(random_llama(1), engine=engine)
    drafter = make_drafter(random_llama(2), engine=engine)
    async with running(target, drafter):
        for sampling in (SAMPLED, GREEDY):
            cold = await speculate(drafter, target, prompt, 40, sampling=sampling)
            for found in (0, 64):
                text = await speculate(
                    drafter, target, prompt, 40, sampling=sampling, salt=repr(sampling)
                )
                assert text.token_ids == cold.token_ids
                assert text.found == (found, found)
            turn = [*prompt, *cold.token_ids, 3]
            cold = await speculate(drafter, target, turn, 40, sampling=sampling)
            warm = await speculate(
                drafter, target, turn, 40, sampling=sampling, salt=repr(sampling)
            )
            assert warm.token_ids == cold.token_ids
            assert warm.found == (96, 96)


@pytest.mark.parametrize("engine", ["torch", "openvino"])
@torch.inference_mode()
def test_rows_of_warm_texts_differ_in_last_bits_at_most(
    engine: EngineName, record_property: Callable[[str, object], None]
) -> None:
    """As those of other batches: the number of rows selects the kernel."""
    if engine == "openvino":
        pytest.importorskip("openvino")
    decoder = decoder_over(random_llama(1), "rows", cache_tokens=4096, engine=engine)
    differing = 0
    for number in range(20):
        prompt, rows, found = [number % 5, *PROMPT, *PROMPT][: 60 + number % 5], [], 0
        for _ in range(2):
            cache = decoder.reserve(80)
            assert cache is not None
            rest = prompt[cache.adopt(prompt, str(number)) :]
            rows.append(decoder.forward([Feed(cache, rest, 1)]).logits[0])
            cache.publish(prompt, len(prompt))
            found = cache.found
            decoder.release(cache)
        assert found == (32 if engine == "openvino" else 48)
        differing += not rows[0].equal(rows[1])
        torch.testing.assert_close(rows[0], rows[1], rtol=0, atol=1e-5)
    record_property("rows of 20 whose last bits differ", differing)

"""Drafts that are trees, by a real decoder: their shape, their numbers, their texts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tandem.drafting.tree import TreeDrafter
from tandem.engine.asks import Truncation
from tandem.speculation.draft import Draft
from tandem.speculation.nodes import depth_of
from tandem.speculation.sampling import Sampling
from tests.tiny import (
    DrafterEngine,
    Text,
    make_drafter,
    make_target,
    random_llama,
    running,
    speculate,
)

PROMPT = [1, 2, 3]
ACCEPTANCE = (0.6, 0.2, 0.1)


def tree_engine(acceptance: tuple[float, ...] = ACCEPTANCE) -> DrafterEngine:
    engine = make_drafter(random_llama(2))
    engine.drafter = TreeDrafter(engine.decoder, Truncation(0.999, 512), acceptance, 16)
    return engine


@pytest.mark.parametrize("rule", ["token", "block"])
async def test_greedy_texts_are_the_models_own(rule: str) -> None:
    target, drafter = make_target(random_llama(1)), tree_engine()
    async with running(target, drafter):
        plain = await speculate(None, target, PROMPT, 40)
        for gamma, nodes in ((4, 4), (3, 6), (4, 12)):
            text = await speculate(
                drafter, target, PROMPT, 40, gamma=gamma, max_nodes=nodes, rule=rule
            )
            assert text.token_ids == plain.token_ids
            assert text.accepted > 0


@pytest.mark.parametrize("rule", ["token", "block"])
async def test_a_tree_of_one_branch_is_the_chain(rule: str) -> None:
    """The same seed, the same text."""
    target, drafter, chains = (
        make_target(random_llama(1)),
        tree_engine((0.9,)),
        make_drafter(random_llama(2)),
    )
    async with running(target, drafter, chains):
        for seed in range(5):
            sampling = Sampling(seed=seed)
            branch, chain = [
                await speculate(
                    engine, target, PROMPT, 30, max_nodes=nodes, rule=rule, sampling=sampling
                )
                for engine, nodes in ((drafter, 4), (chains, 0))
            ]
            assert branch == chain


async def test_a_text_is_the_same_alone_and_beside_others() -> None:
    target, drafter, chains = (
        make_target(random_llama(1)),
        tree_engine(),
        make_drafter(random_llama(2)),
    )

    async def text(seed: int, nodes: int) -> Text:
        engine = drafter if nodes else chains
        return await speculate(
            engine, target, PROMPT, 24, max_nodes=nodes, sampling=Sampling(seed=seed)
        )

    async with running(target, drafter, chains):
        alone = await text(7, 8)
        together = await asyncio.gather(text(7, 8), *(text(n, (0, 6, 12)[n % 3]) for n in range(7)))
        assert together[0] == alone


async def test_siblings_are_distinct_and_deep_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = tree_engine()
    drafts: list[Draft] = []
    own: Any = drafter.draft

    async def noting(*args: Any) -> Draft:
        drafts.append(await own(*args))
        return drafts[-1]

    monkeypatch.setattr(drafter, "draft", noting)
    target = make_target(random_llama(1))
    async with running(target, drafter):
        for seed in range(4):
            await speculate(
                drafter, target, PROMPT, 30, gamma=3, max_nodes=9, sampling=Sampling(seed=seed)
            )
    assert {len(draft) for draft in drafts} > {9}  # the end of a text leaves less depth
    for draft in drafts:
        assert draft.distinct
        assert depth_of(draft.parents, len(draft)) <= 3
        siblings = list(zip(draft.places(), draft.token_ids, strict=True))
        assert len(set(siblings)) == len(siblings)
        # Siblings share the row that they were drawn from, without their earlier ones.
        rows = dict(zip(draft.places(), draft.rows_of_nodes(), strict=True))
        assert [rows[place] for place in draft.places()] == list(draft.rows_of_nodes())

"""Trees drafted by a real decoder: their shape, their probabilities, their texts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tandem.drafting.decoders.chains import ChainsDrafter
from tandem.drafting.decoders.tree import TreeDrafter
from tandem.engine.asks import Truncation
from tandem.speculation.draft import Draft
from tandem.speculation.request.sampling import Sampling
from tandem.speculation.tree import DraftShape
from tests.support.models.tiny import (
    DrafterEngine,
    TargetEngine,
    Text,
    make_drafter,
    make_method,
    make_target,
    random_llama,
    running,
    speculate,
)

pytestmark = pytest.mark.real_time  # the engine has its thread

PROMPT = [1, 2, 3]
ACCEPTANCE = (0.6, 0.2, 0.1)


def tree_engine(acceptance: tuple[float, ...] = ACCEPTANCE) -> DrafterEngine:
    engine = make_drafter(random_llama(2))
    engine.drafter = TreeDrafter(engine.decoder, Truncation(0.999, 512), acceptance, 16)
    return engine


def chains_engine(chains: int) -> DrafterEngine:
    engine = make_drafter(random_llama(2))
    engine.drafter = ChainsDrafter(engine.decoder, Truncation(0.999, 512), chains, 16)
    return engine


def noted(engine: DrafterEngine, monkeypatch: pytest.MonkeyPatch) -> list[Draft]:
    """The drafts that an engine makes from now on."""
    drafts: list[Draft] = []
    own: Any = engine.draft

    async def noting(*args: Any) -> Draft:
        drafts.append(await own(*args))
        return drafts[-1]

    monkeypatch.setattr(engine, "draft", noting)
    return drafts


async def of_seeds(
    count: int, drafter: DrafterEngine, target: TargetEngine, **how: Any
) -> list[Text]:
    """Texts beside each other, one a seed."""
    samplings = [Sampling(seed=seed) for seed in range(count)]
    return await asyncio.gather(
        *(speculate(drafter, target, PROMPT, 30, sampling=own, **how) for own in samplings)
    )


@pytest.mark.parametrize("rule", ["token", "block", "spectr", "gbv"])
async def test_greedy_texts_of_chains_are_the_models_own(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = make_target(random_llama(1)), chains_engine(3)
    drafts = noted(drafter, monkeypatch)
    async with running(target, drafter):
        plain = await speculate(None, target, PROMPT, 40)
        text = await speculate(drafter, target, PROMPT, 40, gamma=4, budget=12, rule=rule)
        assert text.token_ids == plain.token_ids
        assert text.accepted > 0
    assert {len(draft) for draft in drafts} == {1, 2, 3, 4}, "all chains are one"


@pytest.mark.parametrize("rule", ["token", "block", "spectr", "gbv"])
async def test_one_of_several_chains_is_the_chain(rule: str) -> None:
    """The same seed, the same text."""
    like = {"spectr": "token", "gbv": "block"}.get(rule, rule)
    target, drafter, model = (
        make_target(random_llama(1)),
        chains_engine(1),
        make_drafter(random_llama(2)),
    )
    async with running(target, drafter, model):
        alone = await of_seeds(5, drafter, target, budget=16, rule=rule)
        assert alone == await of_seeds(5, model, target, rule=like)


@pytest.mark.parametrize(
    ("nodes", "chains", "depth"), [(9, 3, 3), (16, 3, 3), (8, 2, 3), (2, 1, 2)]
)
async def test_chains_share_their_common_beginnings(
    nodes: int, chains: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many draws at a place as chains reach it, from one row; repeated ones are twins."""
    target, drafter = make_target(random_llama(1)), chains_engine(3)
    drafts = noted(drafter, monkeypatch)
    async with running(target, drafter):
        await of_seeds(6, drafter, target, gamma=3, budget=nodes)
    full = [draft for draft in drafts if draft.depth == depth]
    assert full
    assert {len(draft) for draft in full} == {chains * depth}
    for draft in drafts:
        assert not draft.distinct
        assert draft.misfit(DraftShape.IID_CHAINS) == ""
    twins = [list(draft.homes()) != list(range(1, len(draft) + 1)) for draft in full]
    assert any(twins) == (chains > 1)
    assert not all(twins)


@pytest.mark.parametrize("rule", ["token", "block"])
async def test_greedy_texts_are_the_models_own(rule: str) -> None:
    target, drafter = make_target(random_llama(1)), tree_engine()
    async with running(target, drafter):
        plain = await speculate(None, target, PROMPT, 40)
        texts = await asyncio.gather(
            *(
                speculate(drafter, target, PROMPT, 40, gamma=gamma, budget=nodes, rule=rule)
                for gamma, nodes in ((4, 4), (3, 6), (4, 12))
            )
        )
        for text in texts:
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
        branch = await of_seeds(5, drafter, target, budget=4, rule=rule)
        assert branch == await of_seeds(5, chains, target, rule=rule)


@pytest.mark.parametrize("name", ["tree", "chains", "forest"])
async def test_a_text_is_the_same_alone_and_beside_others(name: str) -> None:
    """Beside greedy texts, drafts of other sizes, and chains of another drafter."""
    target, drafter, model = (
        make_target(random_llama(1)),
        make_method(name),
        make_drafter(random_llama(2)),
    )

    async def text(seed: int, nodes: int) -> Text:
        sampling = Sampling(seed=seed, temperature=float(seed != 3))
        engine = drafter if nodes else model
        return await speculate(engine, target, PROMPT, 24, budget=nodes, sampling=sampling)

    async with running(target, drafter, model):
        alone = await text(7, 8)
        together = await asyncio.gather(text(7, 8), *(text(n, (0, 6, 12)[n % 3]) for n in range(7)))
        assert together[0] == alone


@pytest.mark.parametrize("rule", ["token", "block"])
async def test_greedy_texts_of_a_forest_are_the_models_own(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first tokens are the likeliest of each model that the models before it did not draw."""
    target, drafter = make_target(random_llama(1)), make_method("forest")
    drafts = noted(drafter, monkeypatch)
    async with running(target, drafter):
        plain = await speculate(None, target, PROMPT, 40)
        text = await speculate(drafter, target, PROMPT, 40, gamma=3, budget=9, rule=rule)
        assert text.token_ids == plain.token_ids
        assert text.accepted > 0
    for draft in drafts:
        first = [t for t, place in zip(draft.token_ids, draft.places(), strict=True) if not place]
        assert len(first) == len(set(first)) >= 2 or len(draft) == 1
        assert draft.sizes == [0] * len(draft.sizes)


@pytest.mark.parametrize(
    ("gamma", "nodes", "shares"), [(3, 9, [6, 3]), (3, 4, [2, 2]), (4, 1, [1, 0]), (1, 16, [3, 1])]
)
def test_the_parts_of_a_forest_share_its_nodes(gamma: int, nodes: int, shares: list[int]) -> None:
    forest: Any = make_method("forest").drafter
    assert forest._shared(gamma, nodes) == shares


async def test_siblings_are_distinct_and_deep_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = tree_engine()
    drafts = noted(drafter, monkeypatch)
    target = make_target(random_llama(1))
    async with running(target, drafter):
        await of_seeds(8, drafter, target, gamma=3, budget=9)
    assert {len(draft) for draft in drafts} > {9}  # the end of a text leaves less depth
    for draft in drafts:
        assert draft.distinct
        assert draft.depth <= 3
        siblings = list(zip(draft.places(), draft.token_ids, strict=True))
        assert len(set(siblings)) == len(siblings)
        # Siblings share the row that they were drawn from, without their earlier ones.
        rows = dict(zip(draft.places(), draft.rows_of_nodes(), strict=True))
        assert [rows[place] for place in draft.places()] == list(draft.rows_of_nodes())

"""Drafts by retrieval: exact whatever the stores hold, and what the stores' order means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drafter_svc.loading import load
from drafter_svc.settings import DrafterSettings
from tandem.drafting.choice.built_in import built_in
from tandem.drafting.choice.recipe_file import recipe_from
from tandem.drafting.drafter import Drafter, DraftSequence
from tandem.drafting.lookups.retrieval import RetrievalDrafter
from tandem.engine.asks import Steps, Truncation
from tandem.errors import StartupError
from tandem.retrieval.build import write_index
from tandem.retrieval.prompt import PromptStore
from tandem.retrieval.store import Continuations
from tandem.speculation.draft import Draft
from tandem.speculation.request.sampling import Sampling
from tandem.verification import VERIFIERS
from tests.support.laws.methods import Enumeration
from tests.support.laws.tables import VOCAB_SIZE, Table

TOLERANCE = 1e-12
LENGTH, GAMMA, NODES = 4, 3, 5


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """Of all three tokens, in an order that repeats itself but for its end."""
    write_index(tmp_path / "index", np.array([0, 1, 2, 0, 1, 1, 2, 0, 2, 2, 1]), VOCAB_SIZE, "t")
    return tmp_path / "index"


def made(stores: str, index: Path, **keys: Any) -> Drafter:
    settings = DrafterSettings(stores=stores, index=str(index), max_nodes=NODES, **keys)
    return built_in("retrieval", settings).make((), Truncation(1.0, 0))


def enumeration_of(drafter: Drafter, seed: int = 1) -> Enumeration:
    target = Table(LENGTH + GAMMA, 10 * seed, zeros=True)
    return Enumeration(drafter, 0, target, LENGTH, GAMMA, NODES)


@pytest.mark.parametrize("stores", ["prompt", "corpus", "bigrams", "prompt,corpus,bigrams"])
def test_any_store_leaves_the_law_as_it_is(stores: str, index: Path) -> None:
    enumeration = enumeration_of(made(stores, index))
    for rule in ("token", "block"):
        assert enumeration.error(VERIFIERS[rule]) < TOLERANCE
    drafts = [draft for found in enumeration.outcomes for draft in found.drafts]
    assert any(drafts)
    assert not any(any(draft.sizes) for draft in drafts), "all tokens are certain"
    branching = [draft for draft in drafts if not draft.is_chain]
    assert bool(branching) == (stores != "bigrams")


class Learning(PromptStore):
    """Looks up in everything that was proposed too, rejected tokens included."""

    def __init__(self) -> None:
        super().__init__(4, 100)
        self.proposed: list[int] = []

    def continuations(self, text: Sequence[int], depth: int) -> Iterator[Continuations]:
        yield from super().continuations([*self.proposed, *text], depth)


class LearningDrafter(RetrievalDrafter):
    """Its pool, part of the sequence's state, takes in each draft before it is verified."""

    def draft(self, sequence: DraftSequence, round_: int, gamma: int, budget: int) -> Steps[Draft]:
        (store,) = self._stores
        assert isinstance(store, Learning)
        store.proposed = list(sequence.state or ())
        draft: Draft = yield from super().draft(sequence, round_, gamma, budget)
        sequence.state = (*store.proposed, *draft.token_ids)
        return draft


def test_a_store_that_learns_from_rejected_tokens_leaves_it_too() -> None:
    enumeration = enumeration_of(LearningDrafter([Learning()], NODES))
    for rule in ("token", "block"):
        assert enumeration.error(VERIFIERS[rule]) < TOLERANCE
    assert enumeration.deepest >= 2


def drafted(drafter: Drafter, text: list[int], gamma: int, budget: int, size: int = 9) -> Draft:
    steps = drafter.draft(DraftSequence(text, Sampling(), size), 1, gamma, budget)
    with pytest.raises(StopIteration) as end:
        next(steps)
    draft: Draft = end.value.value
    return draft


def test_stores_fill_a_draft_in_their_order(tmp_path: Path) -> None:
    write_index(tmp_path / "index", np.array([5, 6, 7, 5, 8, 7]), 9, "t")
    text = [5, 1, 2, 5]
    first = drafted(made("prompt,corpus", tmp_path / "index"), text, 2, 4)
    assert (first.token_ids, first.parents) == ([1, 2, 6, 7], [0, 1, 0, 3])
    second = drafted(made("corpus,prompt", tmp_path / "index"), text, 2, 4)
    assert (second.token_ids, second.parents) == ([6, 7, 8, 7], [0, 1, 0, 3])
    chain = drafted(made("bigrams", tmp_path / "index"), text, 3, 4)
    assert (chain.token_ids, chain.parents) == ([6, 7, 5], None)


def test_the_tree_is_no_larger_than_its_budget_and_its_key(tmp_path: Path) -> None:
    write_index(tmp_path / "index", np.array([x for i in range(1, 9) for x in (0, i)]), 9, "t")
    drafter = made("corpus", tmp_path / "index")
    assert len(drafted(drafter, [0], 1, 64)) == NODES
    assert len(drafted(drafter, [0], 1, 2)) == 2
    assert drafter.traits.largest_tree == NODES


def test_it_drafts_ids_of_the_indexs_tokenizer_only(index: Path) -> None:
    settings = DrafterSettings(method="retrieval", stores=("corpus",), index=str(index))
    info = load(settings).info
    assert (info.tokenizer_fingerprint, info.vocab_size, info.max_nodes) == ("t", VOCAB_SIZE, 16)
    # Without an index any tokenizer will do.
    info = load(DrafterSettings(method="retrieval")).info
    assert (info.tokenizer_fingerprint, info.vocab_size, info.max_nodes) == ("", 0, 16)


def test_an_index_that_is_not_there_is_named() -> None:
    with pytest.raises(StartupError, match="no index in 'nowhere': No such file"):
        load(DrafterSettings(method="retrieval", stores=("corpus",), index="nowhere"))


def test_bad_keys_are_named() -> None:
    for keys, sentence in (
        ({"stores": []}, "stores: Tuple should have at least 1 item"),
        ({"stores": ["web"]}, r"stores\[0\]: Input should be 'prompt', 'corpus' or 'bigrams'"),
        ({"match": 0}, "match: Input should be greater than or equal to 1"),
        ({"index": 3}, "index: Input should be a valid string"),
    ):
        with pytest.raises(ValueError, match=sentence):
            recipe_from({"method": "retrieval", **keys})


def test_callers_are_not_told_where_the_index_is(index: Path) -> None:
    recipe = built_in("retrieval", DrafterSettings(index=str(index)))
    assert '"index":"index"' in recipe.model_dump_json()

"""The drafting methods that serve are exact: each is run against tables, through all outcomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from drafter_svc.built_in import built_ins
from drafter_svc.methods import METHODS
from drafter_svc.settings import DrafterSettings
from tandem.drafting import ranks
from tandem.drafting.drafter import Drafter
from tandem.engine.asks import Steps, Truncation
from tandem.inference.kv.extents import SequenceCache
from tandem.speculation.draft import Draft
from tandem.speculation.nodes import DraftShape
from tandem.verification import VERIFIERS, Verifier
from tests.support.laws.landed import Enumeration
from tests.support.laws.tables import Table

TOLERANCE = 1e-12
LENGTH, GAMMA, NODES = 4, 3, 6
# What one of the mutants has to be found by.
SEEN = 1e-4
# Three shapes of trees: mixed, a part of a forest that is a chain, and siblings of all tokens.
ACCEPTANCES = ((0.6, 0.3, 0.25), (0.7, 0.3, 0.2), (0.6, 0.5, 0.4))
LOSSLESS = Truncation(1.0, 0)


def made(name: str, seed: int, *, zeros: bool, length: int = LENGTH) -> Enumeration:
    """A method of its built-in recipe, against tables."""
    acceptance = ACCEPTANCES[seed]
    recipe = built_ins(DrafterSettings(max_nodes=NODES, chains=2, acceptance=acceptance))[name]
    longest = LENGTH + GAMMA
    scorers = [
        Table(longest, 10 * seed + i, zeros=zeros) for i in range(1, len(recipe.checkpoints) + 1)
    ]
    drafter = METHODS[name](recipe, scorers, LOSSLESS)
    target = Table(longest, 10 * seed, zeros=zeros)
    return Enumeration(drafter, len(scorers), target, length, GAMMA, NODES)


def suited(drafter: Drafter) -> list[Verifier[Any]]:
    """The rules that take a drafter's drafts, but for those that look at whole texts."""
    return [
        rule
        for rule in VERIFIERS.values()
        if not rule.needs_pure
        and (drafter.shape in (DraftShape.CHAIN, rule.takes) or rule.takes is DraftShape.TREE)
    ]


@pytest.mark.parametrize("seed", range(len(ACCEPTANCES)))
@pytest.mark.parametrize("name", METHODS)
def test_a_method_leaves_the_law_as_it_is(name: str, seed: int) -> None:
    # Where every token may come, a text less long has as many outcomes.
    enumeration = made(name, seed, zeros=seed > 0, length=LENGTH - (seed == 0))
    rules = suited(enumeration.drafter)
    assert len(rules) >= 2
    for rule in rules:
        assert enumeration.error(rule) < TOLERANCE, rule.name
    assert enumeration.deepest >= 2


@pytest.mark.parametrize("name", ["tree", "forest"])
def test_shapes_that_follow_what_was_kept_leave_it_too(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text whose first places outweigh all that was expected has other shapes round by round."""
    shapes: list[set[tuple[int, ...]]] = []
    for beforehand in (32, 0.2):
        monkeypatch.setattr(ranks, "_BEFOREHAND", beforehand)
        enumeration = made(name, 2, zeros=True)
        for rule in ("token", "block"):
            assert enumeration.error(VERIFIERS[rule]) < TOLERANCE
        drafts = [draft for found in enumeration.outcomes for draft in found.drafts]
        shapes.append({tuple(draft.places()) for draft in drafts})
    assert shapes[1] - shapes[0]


def test_every_method_is_built_in() -> None:
    assert set(built_ins(DrafterSettings())) == set(METHODS)


def _unsaid(draft: Draft) -> Draft:
    """Siblings without replacement, claimed independent."""
    return replace(draft, distinct=False)


def _repeats_dropped(draft: Draft) -> Draft:
    """Of draws that agree one is sent, claimed independent."""
    sent = [node for node, home in enumerate(draft.homes(), 1) if home == node]
    number = {0: 0} | {place: i for i, place in enumerate(sent, 1)}
    return replace(
        draft,
        token_ids=[draft.token_ids[place - 1] for place in sent],
        parents=[number[draft.places()[place - 1]] for place in sent],
        row_of=[draft.rows_of_nodes()[place - 1] for place in sent],
    )


def _first_models_row(draft: Draft) -> Draft:
    """At the root every token claims the row of the first one."""
    rows = zip(draft.places(), draft.rows_of_nodes(), strict=True)
    return replace(draft, row_of=[row if place else 0 for place, row in rows])


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("tree", _unsaid),
        ("chains", _repeats_dropped),
        ("forest", _unsaid),
        ("forest", _first_models_row),
    ],
)
def test_a_method_that_breaks_the_contract_is_seen(
    name: str, edit: Callable[[Draft], Draft], monkeypatch: pytest.MonkeyPatch
) -> None:
    enumeration = made(name, 1, zeros=False, length=3)
    own: Any = enumeration.drafter.draft

    def draft(*args: Any) -> Steps[Draft]:
        return edit((yield from own(*args)))

    monkeypatch.setattr(enumeration.drafter, "draft", draft)
    assert enumeration.error(VERIFIERS["token"]) > SEEN


def test_a_cache_that_keeps_another_path_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactness would not show it: only acceptance would be lost."""
    own = SequenceCache.keep

    def first_rows(cache: SequenceCache, path: Sequence[int]) -> None:
        own(cache, [] if not path else [1])

    monkeypatch.setattr(SequenceCache, "keep", first_rows)
    with pytest.raises(AssertionError, match="the cache holds another text"):
        made("chains", 0, zeros=False).error(VERIFIERS["token"])

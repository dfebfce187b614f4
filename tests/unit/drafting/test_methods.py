"""The drafting methods in production are exact: each is run on tables, through all outcomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from drafter_svc.settings import DrafterSettings
from tandem.drafting.choice.built_in import built_in
from tandem.drafting.decoders import ranks
from tandem.drafting.decoders.model import ModelDrafter
from tandem.drafting.drafter import DraftSequence
from tandem.drafting.heads.head import OfHead
from tandem.drafting.lookups.lookup import LookupDrafter
from tandem.drafting.methods import METHODS
from tandem.engine.asks import Steps, Truncation
from tandem.inference.kv.extents import SequenceCache
from tandem.settings import LONGEST_DRAFT
from tandem.speculation.draft import Draft
from tandem.speculation.tree import DraftShape
from tandem.verification import VERIFIERS
from tests.support.laws.methods import Enumeration
from tests.support.laws.suited import rules_for
from tests.support.laws.tables import Flat, Table, scorers_of

TOLERANCE = 1e-12
LENGTH, GAMMA, NODES = 4, 3, 6
# What one of the mutants has to be found by.
SEEN = 1e-4
# Three shapes of trees: mixed, a part of a forest that is a chain, and siblings of all tokens.
ACCEPTANCES = ((0.6, 0.3, 0.25), (0.7, 0.3, 0.2), (0.6, 0.5, 0.4))
LOSSLESS = Truncation(1.0, 0)


def made(name: str, seed: int, *, zeros: bool, length: int = LENGTH, **keys: Any) -> Enumeration:
    """A method of its built-in recipe, against tables."""
    own = {"lookahead_window": 2, "lookahead_ngram": 3, "lookahead_candidates": 2}
    own |= {"masks": 2, "phrases_ngram": 2}
    keys = {"max_nodes": NODES, "chains": 2, "acceptance": ACCEPTANCES[seed], **own, **keys}
    recipe = built_in(name, DrafterSettings(**keys))
    longest = LENGTH + GAMMA
    depths = tuple(tuple(share / depth for share in ACCEPTANCES[seed]) for depth in (1, 1.2, 1.5))
    scorers = scorers_of(recipe, longest, 10 * seed + 1, zeros=zeros, depths=depths)
    drafter = recipe.make(scorers, LOSSLESS)
    target = Table(longest, 10 * seed, zeros=zeros)
    return Enumeration(drafter, len(scorers), target, length, GAMMA, NODES)


# Only trees, also those of a forest, have the third shape.
@pytest.mark.parametrize(
    ("name", "seed"),
    [
        (name, seed)
        for name, recipe in METHODS.items()
        for seed in range(3 if recipe.drafter.traits.shape is DraftShape.TREE else 2)
    ],
)
def test_a_method_leaves_the_law_as_it_is(name: str, seed: int) -> None:
    # Where every token may come, a text less long has as many outcomes.
    enumeration = made(name, seed, zeros=seed > 0, length=LENGTH - (seed == 0))
    # But for those that look at whole texts: what they rely on is enumerated below.
    rules = [rule for rule in rules_for(enumeration.drafter) if not rule.needs_every_draft]
    assert len(rules) >= 2
    for rule in rules:
        assert enumeration.error(rule) < TOLERANCE, rule.name
    assert enumeration.deepest >= 2


HEADS = [name for name, recipe in METHODS.items() if issubclass(recipe, OfHead)]


def test_shapes_that_follow_what_was_drawn_leave_it_too() -> None:
    enumeration = made("eagle", 1, zeros=True, grow="confidence")
    for rule in ("token", "block"):
        assert enumeration.error(VERIFIERS[rule]) < TOLERANCE
    drafts = [draft for found in enumeration.outcomes for draft in found.drafts]
    shapes = {tuple(draft.places()) for draft in drafts if draft.depth == GAMMA}
    assert len({len(shape) for shape in shapes}) < len(shapes), "all drafts of a size are alike"


@pytest.mark.parametrize("name", HEADS)
def test_a_head_that_sends_certain_tokens_leaves_it_too(name: str) -> None:
    enumeration = made(name, 1, zeros=True, certain=True)
    for rule in ("token", "block"):
        assert enumeration.error(VERIFIERS[rule]) < TOLERANCE
    drafts = [draft for found in enumeration.outcomes for draft in found.drafts]
    assert not any(any(draft.sizes) for draft in drafts)


@pytest.mark.parametrize("name", HEADS)
def test_a_head_whose_feature_did_not_come_drafts_nothing(name: str) -> None:
    enumeration = made(name, 1, zeros=True)
    enumeration.late = True
    assert enumeration.error(VERIFIERS["token"]) < TOLERANCE
    assert enumeration.deepest >= 1
    drafts = [draft for found in enumeration.outcomes for draft in found.drafts]
    assert not all(map(len, drafts))


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


PURE = [name for name, recipe in METHODS.items() if recipe.drafter.traits.pure]


@pytest.mark.parametrize("seed", range(len(ACCEPTANCES)))
@pytest.mark.parametrize("name", PURE)
def test_a_method_that_is_pure_keeps_its_promise(name: str, seed: int) -> None:
    """After the same tokens the same row, wherever the round began, and no draft is short."""
    assert made(name, seed, zeros=seed > 0).broken_promise() == ""


@pytest.mark.parametrize("name", PURE)
def test_it_drafts_the_most_that_can_be_asked_for(name: str) -> None:
    """Too long to be enumerated: one outcome of each length."""
    recipe = built_in(name, DrafterSettings())
    scorers = [Flat() for _ in recipe.checkpoints]
    drafter = recipe.make(scorers, LOSSLESS)
    for gamma in (GAMMA + 1, 16, LONGEST_DRAFT):
        enumeration = Enumeration(drafter, len(scorers), Flat(), 1, gamma, gamma)
        assert enumeration.depth_of_one() == gamma, "a method that is pure drafts full chains"


def test_a_lookup_is_not_pure() -> None:
    """It drafts nothing where it finds nothing."""
    assert made("lookup", 0, zeros=False).broken_promise() == "drafted 0 of 3 after (0, 1)"


def test_drafts_that_are_one_short_break_the_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ModelDrafter.draft

    def short(
        self: ModelDrafter, sequence: DraftSequence, round_: int, gamma: int, budget: int
    ) -> Steps[Draft]:
        return own(self, sequence, round_, max(gamma - 1, 1), budget)

    monkeypatch.setattr(ModelDrafter, "draft", short)
    assert made("model", 0, zeros=False).broken_promise().startswith("drafted 2 of 3 after")


def test_rows_that_depend_on_where_the_round_began_break_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lookup that fills its drafts up: each has its length, and is not pure all the same."""
    own = LookupDrafter.draft

    def filled(
        self: LookupDrafter, sequence: DraftSequence, round_: int, gamma: int, budget: int
    ) -> Steps[Draft]:
        found = yield from own(self, sequence, round_, gamma, budget)
        return Draft.certain([*found.token_ids, *[0] * (gamma - len(found))])

    monkeypatch.setattr(LookupDrafter, "draft", filled)
    broken = made("lookup", 0, zeros=False, lookup_ngram=1).broken_promise()
    assert "a round that began after" in broken


def _unsaid(draft: Draft) -> Draft:
    """Siblings without replacement, claimed independent."""
    return replace(draft, distinct=False)


def _repeats_dropped(draft: Draft) -> Draft:
    """Of draws that agree one is sent, claimed independent."""
    return _only(draft, [node for node, home in enumerate(draft.homes(), 1) if home == node])


def _only(draft: Draft, sent: Sequence[int]) -> Draft:
    """The places that are sent of a draft, each with the one it hangs at."""
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


def _weak_dropped(draft: Draft) -> Draft:
    """A leaf is withdrawn because of its token."""
    places = range(1, len(draft) + 1)
    weak = set(places) - set(draft.places()) if draft.token_ids[-1] == 0 else set()
    return _only(draft, [place for place in places if place != max(weak, default=0)])


def _cousins_dropped(draft: Draft) -> Draft:
    """Of leaves with one row that agree one is sent."""
    seen: set[tuple[int, int]] = set()
    sent = []
    for place, key in enumerate(zip(draft.rows_of_nodes(), draft.token_ids, strict=True), 1):
        if place in draft.places() or key not in seen:
            sent.append(place)
        seen.add(key)
    return _only(draft, sent)


def _likeliest_claimed(draft: Draft) -> Draft:
    """The first siblings come in the order of their row's weights, and claim to be drawn."""
    row = dict(zip(draft.ids[: draft.sizes[0]].tolist(), draft.weights.tolist(), strict=False))
    count = draft.places().count(0)
    first = sorted(draft.token_ids[:count], key=lambda token: -row.get(token, 0))
    return replace(draft, token_ids=[*first, *draft.token_ids[count:]])


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("eagle", _unsaid),
        ("eagle", _weak_dropped),
        ("medusa", _unsaid),
        ("medusa", _weak_dropped),
        ("medusa", _cousins_dropped),
        ("medusa", _likeliest_claimed),
        ("tree", _unsaid),
        ("chains", _repeats_dropped),
        ("forest", _unsaid),
        ("forest", _first_models_row),
    ],
)
def test_a_method_that_breaks_the_contract_is_seen(
    name: str, edit: Callable[[Draft], Draft], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Texts of two tokens show all but one of them.
    enumeration = made(name, 1, zeros=False, length=3 if edit is _first_models_row else 2)
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
        made("chains", 0, zeros=False, length=3).error(VERIFIERS["token"])

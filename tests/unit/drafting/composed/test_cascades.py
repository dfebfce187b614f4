"""Cascades and horizontal recipes are exact, whatever their parts are."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest

from tandem.drafting.choice.recipe_file import recipe_from
from tandem.drafting.composed.cascade import CascadeDrafter
from tandem.drafting.drafter import DraftSequence
from tandem.drafting.methods import Chain
from tandem.drafting.part import PartDrafter
from tandem.engine.answers import ReviewAnswer
from tandem.engine.asks import Review, Truncation
from tandem.speculation.request.sampling import Sampling
from tandem.verification import VERIFIERS
from tests.support.laws import tables
from tests.support.laws.methods import Enumeration
from tests.support.laws.suited import rules_for
from tests.support.laws.tables import Table, scorers_of

TOLERANCE = 1e-12
LENGTH, GAMMA = 4, 3
SEEN = 1e-3
MODEL, LOOKUP = {"method": "model"}, {"method": "lookup", "ngram": 1}


def cascade(inner: Any = MODEL, **keys: Any) -> dict[str, Any]:
    return {"method": "cascade", "inner": inner, "tokens": 2, **keys}


def horizontal(*parts: Any, tokens: Any = (1,)) -> dict[str, Any]:
    return {"method": "horizontal", "parts": list(parts), "tokens": list(tokens)}


def made(
    keys: dict[str, Any], seed: int = 1, length: int = LENGTH, gamma: int = GAMMA
) -> Enumeration:
    recipe = recipe_from(keys)
    longest = LENGTH + GAMMA
    scorers = scorers_of(recipe, longest, 10 * seed + 1, zeros=True, depths=((0.7,),) * 3)
    drafter = recipe.make(scorers, Truncation(1.0, 0))
    target = Table(longest, 10 * seed, zeros=True)
    return Enumeration(drafter, len(scorers), target, length, GAMMA, GAMMA)


CASES = {
    f"{name} {rule} {cut}": cascade(inner, rule=rule, cut=cut)
    for rule in ("token", "block")
    for cut in ("fixed", "round")
    for name, inner in (("model", MODEL), ("lookup", LOOKUP))
} | {
    "three": cascade(cascade(LOOKUP, rule="token"), rule="block"),
    "three models": cascade(cascade(MODEL, rule="token"), rule="block"),
    "three, whole rounds": cascade(cascade(LOOKUP, cut="round"), rule="token", cut="round"),
    "retrieval": cascade({"method": "retrieval"}),
    "stops": cascade({**MODEL, "stop": "confidence", "threshold": 0.45}),
    "over horizontal": cascade(horizontal(MODEL, LOOKUP)),
    "horizontal": horizontal(MODEL, MODEL),
    "horizontal, lookup first": horizontal(LOOKUP, MODEL, tokens=(2,)),
    "horizontal over a cascade": horizontal(cascade(LOOKUP, cut="round"), MODEL, tokens=(2,)),
    "certain": cascade(certain=True, leniency=3.0),
}


CASCADES = pytest.mark.campaign(
    "the law of a cascade in a cascade, with three models",
    "one with a lookup inside; each other kind of cascade (this file)",
)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=CASCADES if case == "three models" else ()) for case in CASES],
)
def test_they_leave_the_law_as_it_is(case: str) -> None:
    enumeration = made(CASES[case])
    rules = [rule for rule in rules_for(enumeration.drafter) if not rule.needs_every_draft]
    assert len(rules) >= 2
    for rule in rules:
        assert enumeration.error(rule) < TOLERANCE, rule.name
    assert enumeration.deepest == GAMMA


@pytest.mark.parametrize("inner", [MODEL, LOOKUP, cascade(LOOKUP, cut="round")])
def test_a_cascade_of_fixed_depth_is_pure_whatever_is_inside(inner: Any) -> None:
    enumeration = made(cascade(inner), length=3)
    assert enumeration.drafter.traits.pure
    assert enumeration.broken_promise() == ""
    for keys in ({"cut": "round"}, {"certain": True}):
        assert not made(cascade(inner, **keys)).drafter.traits.pure


def test_parts_are_numbered_in_the_order_of_the_recipe() -> None:
    """A seed keeps its text: the numbers key what is drawn."""
    recipe = recipe_from(cascade(horizontal(cascade(MODEL), LOOKUP)))
    scorers = scorers_of(recipe, LENGTH + GAMMA, 1, zeros=True, depths=((0.7,),) * 3)
    sequence = DraftSequence([0, 1], Sampling(seed=3), tables.VOCAB_SIZE)
    sequence.caches = [tables.cache_of(9) for _ in scorers]
    drafter = recipe.make(scorers, Truncation(1.0, 0))
    tables.Answering(tables.Chooser(()), None).run(drafter.open(sequence))
    whole = sequence.state
    inner, lookup = whole.inner.state
    assert (sequence.part, whole.reviewer.part, whole.inner.part) == (1, 2, 3)
    assert (inner.part, inner.state.reviewer.part, inner.state.inner.part) == (4, 5, 6)
    assert lookup.part == 7


def test_every_method_that_can_be_a_part_takes_back_what_it_observed() -> None:
    for recipe in get_args(get_args(Chain)[0]):
        assert issubclass(recipe.drafter, PartDrafter), recipe


def test_inner_rounds_end_where_the_whole_is_cut() -> None:
    """Every draft that may be asked for, and as deep as that."""
    enumeration = made(cascade(LOOKUP, tokens=1))
    enumeration.error(VERIFIERS["token"])
    for found in enumeration.outcomes:
        assert {draft.depth for draft in found.drafts} == {found.asked}
    whole = made(cascade(LOOKUP, tokens=1, cut="round"))
    whole.error(VERIFIERS["token"])
    depths = {draft.depth for found in whole.outcomes for draft in found.drafts if found.asked == 3}
    assert depths == {2, 3}


def answered(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Reviews are answered in another way."""
    own = tables.Answering._review

    def review(self: Any, ask: Review) -> ReviewAnswer:
        found: ReviewAnswer = change(self, ask, lambda: own(self, ask))
        return found

    monkeypatch.setattr(tables.Answering, "_review", review)


def inner_row_sent(self: Any, ask: Review, review: Any) -> ReviewAnswer:
    found: ReviewAnswer = review()
    ends = np.cumsum([0, *ask.guess.sizes])
    for node in range(found.kept):
        if ask.guess.sizes[node]:
            entries = slice(ends[node], ends[node + 1])
            found.rows[node] = ask.guess.ids[entries], ask.guess.weights[entries]
    return found


def drawn_from_the_reviewer(self: Any, ask: Review, review: Any) -> ReviewAnswer:
    """TriForce's code: after a rejected token comes one of the reviewer's whole row."""
    found: ReviewAnswer = review()
    if found.kept < len(ask.guess):
        ids, weights = found.rows[found.kept]
        token = int(ids[self._chooser.choose(weights.tolist())])
        found.token_ids = [*found.token_ids[: found.kept], token]
    return found


def lenient(self: Any, ask: Review, review: Any) -> ReviewAnswer:
    ask.leniency = 2.0
    answer: ReviewAnswer = review()
    return answer


MUTANTS = pytest.mark.campaign(
    "a cascade with the inner rule `block` that breaks the contract is seen",
    "the same with `token`; each cascade enumerated with both (this file)",
)


@pytest.mark.parametrize("mutant", [inner_row_sent, drawn_from_the_reviewer, lenient])
@pytest.mark.parametrize("rule", ["token", pytest.param("block", marks=MUTANTS)])
def test_a_cascade_that_breaks_the_contract_is_seen(
    mutant: Any, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    enumeration = made(cascade(MODEL, rule=rule), seed=2, length=3)
    answered(monkeypatch, mutant)
    assert enumeration.error(VERIFIERS["token"]) > SEEN


@pytest.mark.parametrize("rule", ["token", "block"])
def test_an_inner_round_without_its_correction_is_seen(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own: Any = CascadeDrafter._review

    def review(self: Any, sequence: Any, round_: int, tokens: Any, guess: Any, left: int) -> Any:
        found = yield from own(self, sequence, round_, tokens, guess, left)
        if 0 < found.kept < len(guess):
            found.token_ids, found.rows = found.token_ids[:-1], found.rows[:-1]
            held = sequence.state.reviewer.state
            held.pop()  # the last token is computed again, for what follows it
            sequence.caches[0].rollback(len(held))
        return found

    enumeration = made(cascade(MODEL, rule=rule), seed=2, length=3)
    monkeypatch.setattr(CascadeDrafter, "_review", review)
    assert enumeration.error(VERIFIERS["token"]) > SEEN


def test_argmax_drafts_with_a_softmax_row_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft & Verify's code by default: the likeliest token, and the row as if it were drawn."""
    own: Any = tables.Answering._draw

    def likeliest(self: Any, ask: Any, laws: Any) -> Any:
        chooser, self._chooser = self._chooser, Likeliest(())
        try:
            return own(self, ask, laws)
        finally:
            self._chooser = chooser

    class Likeliest(tables.Chooser):
        def choose(self, weights: Any) -> int:
            return int(np.argmax(weights))

    monkeypatch.setattr(tables.Answering, "_draw", likeliest)
    enumeration = made(MODEL)
    assert enumeration.error(VERIFIERS["token"]) > 0.05


def test_what_keeps_and_what_corrects_have_numbers_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The enumeration answers for any numbers, and would not see two that are one."""
    seen: list[list[float]] = []

    def noting(self: Any, ask: Review, own: Any) -> ReviewAnswer:
        seen.append(ask.uniforms.tolist())
        reviewed: ReviewAnswer = own()
        return reviewed

    answered(monkeypatch, noting)
    made(cascade(), length=3).error(VERIFIERS["token"])
    assert max(map(len, seen)) == 3
    assert all(len(set(numbers)) == len(numbers) for numbers in seen)

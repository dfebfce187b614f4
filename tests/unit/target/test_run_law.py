"""Texts of a run follow the target's law."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tandem.drafting.decoders.model import ModelDrafter
from tandem.drafting.methods import METHODS
from tandem.engine.asks import Steps
from tandem.inference.feed import Resumed
from tandem.inference.kv.extents import SequenceCache
from tandem.speculation.draft import Draft
from tandem.verification import VERIFIERS
from target_svc.drafts import OwnDrafts
from target_svc.round import Resumable, TargetSequence
from tests.support.laws.runs.answering import GAMMA
from tests.support.laws.runs.law import SEEN, SIZES, TOLERANCE, RunLaw
from tests.support.laws.suited import rules_for
from tests.support.laws.tables import PROMPT

WITH_TOKEN = pytest.mark.campaign(
    "a run of `cascade`, `horizontal`, `forest`, `chains` or `phrases` with `token` leaves the law"
    " as it is",
    "the same with `block` (this file); both rules in unit/drafting",
)

OF_VIEWS = pytest.mark.campaign(
    "a part of the target leaves the law as it is, by `token` too and in chains with branches",
    "the same by `block` and `greedy_block`, in chains and trees (this file)",
)
GIVEN_BACK = pytest.mark.campaign(
    "a text that is given back before each of its rounds keeps its law, with every method and rule",
    "chains by `block`, several chains by `spectr`, a warm tree (this file); the same text by each"
    " method (unit/engine/test_growing.py)",
)
# Each by both rules in unit/drafting.
BY_BLOCK_HERE = ("cascade", "horizontal", "forest", "chains", "phrases")


def cases() -> list[Any]:
    return [
        pytest.param(
            *(name, rule.name, on_device),
            marks=WITH_TOKEN if name in BY_BLOCK_HERE and rule.name == "token" else (),
        )
        for name, recipe in METHODS.items()
        for rule in rules_for(recipe.drafter)
        if rule.name in ("block", "token") or rule.needs_every_draft
        for on_device in ((False, True) if name == "model" else (False,))
    ]


@pytest.mark.parametrize(("name", "rule", "on_device"), cases())
def test_a_run_leaves_the_law_as_it_is(name: str, rule: str, on_device: bool) -> None:
    # After a plain round `masks` has no rows; that it then drafts nothing is below.
    together = VERIFIERS[rule].needs_every_draft or name == "masks"
    sizes = SIZES[:1] if together else SIZES
    law = RunLaw(name, rule, sizes, on_device=on_device)
    assert law.error() < TOLERANCE
    assert law.deepest == GAMMA if name == "model" else law.deepest >= 1
    # Also after plain rounds a head has the newest hidden state.
    assert name in ("lookup", "retrieval", "lookahead", "masks") or not law.empty


@pytest.mark.parametrize(("name", "rule"), [("model", "block"), ("tree", "block")])
def test_so_does_a_text_whose_prompt_was_computed_for_another(name: str, rule: str) -> None:
    law = RunLaw(name, rule, SIZES, warm=True)
    assert law.error() < TOLERANCE
    assert law.deepest >= 1


def given_back() -> list[Any]:
    found = []
    for name, recipe in METHODS.items():
        for rule in rules_for(recipe.drafter):
            if not rule.needs_every_draft:
                here = (name, rule.name) in (("model", "block"), ("chains", "spectr"))
                marks = () if here else GIVEN_BACK
                found.append(pytest.param(name, rule.name, False, False, marks=marks))
    return [
        *found,
        ("tree", "block", True, False),
        pytest.param("model", "token", True, False, marks=GIVEN_BACK),
        pytest.param("model", "block", True, True, marks=GIVEN_BACK),
        pytest.param("tree", "token", False, True, marks=GIVEN_BACK),
    ]


@pytest.mark.parametrize(("name", "rule", "warm", "exit_"), given_back())
def test_so_does_a_text_that_is_given_back_before_each_round(
    name: str, rule: str, warm: bool, exit_: bool
) -> None:
    law = RunLaw(name, rule, SIZES, warm=warm, exit_=exit_, given_back=True)
    assert law.error() < TOLERANCE
    assert law.deepest >= 1 or name == "masks"


def test_a_text_that_resumes_without_its_last_token_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = RunLaw._new

    def shorter(law: RunLaw, token_ids: Sequence[int]) -> TargetSequence:
        return own(law, token_ids[:-1] if len(token_ids) > len(PROMPT) else token_ids)

    monkeypatch.setattr(RunLaw, "_new", shorter)
    assert RunLaw("model", "block", SIZES, given_back=True).error() > SEEN


@pytest.mark.parametrize(
    ("name", "rule", "warm"),
    [
        pytest.param("model", "token", False, marks=OF_VIEWS),
        ("model", "block", True),
        ("model", "greedy_block", False),
        pytest.param("tree", "token", False, marks=OF_VIEWS),
        ("tree", "block", True),
        pytest.param("chains", "block", False, marks=OF_VIEWS),
    ],
)
def test_so_does_a_part_of_the_target_that_drafts(name: str, rule: str, warm: bool) -> None:
    """The target goes on after the rows that its part computed; warm blocks are shared."""
    sizes = SIZES[:1] if VERIFIERS[rule].needs_every_draft else SIZES
    law = RunLaw(name, rule, sizes, warm=warm, exit_=True)
    assert law.error() < TOLERANCE
    assert law.deepest >= 1


@pytest.mark.parametrize("name", ["model", pytest.param("tree", marks=OF_VIEWS)])
def test_a_state_of_another_row_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest row's in the place of each one's, and rows of the draft before."""
    own = OwnDrafts._computed

    def mixed(drafts: OwnDrafts, *args: Any) -> Resumable:
        known = own(drafts, *args)
        if known.resumed is None:
            return known
        last = known.resumed.states[-1][-1:]
        return known._replace(resumed=Resumed(1, [last] * known.resumed.count))

    monkeypatch.setattr(OwnDrafts, "_computed", mixed)
    assert RunLaw(name, "token", SIZES, exit_=True).error() > SEEN


def test_masks_that_have_no_rows_leave_the_law_as_it_is_too() -> None:
    law = RunLaw("masks", "block", SIZES)
    assert law.error() < TOLERANCE
    assert (law.deepest, law.empty > 0) == (0, True)


def test_a_draft_that_is_left_out_for_its_tokens_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ModelDrafter.draft

    def choosy(*args: Any) -> Steps[Draft]:
        draft = yield from own(*args)
        return Draft.certain(()) if draft.token_ids[0] == 0 else draft

    monkeypatch.setattr(ModelDrafter, "draft", choosy)
    assert RunLaw("model", "token", SIZES).error() > SEEN


def test_a_cache_that_keeps_other_tokens_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    own = SequenceCache.rollback

    def late(cache: SequenceCache, length: int) -> None:
        own(cache, min(length + 1, cache.length))

    monkeypatch.setattr(SequenceCache, "rollback", late)
    assert RunLaw("model", "token", SIZES).error() > SEEN

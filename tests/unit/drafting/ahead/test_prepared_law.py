"""Prepared drafts have the law of those that are not, after every outcome. Mutants are seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tandem.drafting.ahead import prepare
from tandem.drafting.ahead.forks import ForkedCache
from tandem.drafting.ahead.outcomes import RoundOutcome
from tandem.drafting.ahead.prepare import Ahead, AheadDraft
from tandem.engine.asks import Steps
from tandem.speculation.prepared_outcome import PreparedOutcome
from tandem.speculation.tree import DraftSize
from tests.support.laws.ahead import PreparedDrafts
from tests.unit.drafting.test_methods import SEEN, TOLERANCE, made

OTHERS = pytest.mark.campaign(
    "prepared drafts leave the law as it is, every method and moment",
    "`model` and `tree` (this file); the law through sockets (service/ahead)",
)

# More than there are outcomes.
ALL = 200
MANY = 1 << 30


@pytest.mark.parametrize(
    ("name", "passes"),
    [
        ("model", 0),
        ("model", 2),
        ("model", MANY),
        ("tree", MANY),
        *(
            pytest.param(name, passes, marks=OTHERS)
            for name in ("tree", "chains", "forest")
            for passes in (1, 2, MANY)
            if (name, passes) != ("tree", MANY)
        ),
    ],
)
def test_what_was_prepared_has_the_law_of_what_was_not(name: str, passes: int) -> None:
    prepared = PreparedDrafts(made(name, 1, zeros=True, length=3), ALL)
    assert prepared.error(passes) < TOLERANCE
    assert prepared.came[PreparedOutcome.HIT] > 0 or passes < MANY
    assert prepared.came[PreparedOutcome.LATE] > 0 or passes != 2


class LooksGood(Ahead):
    """Uses what was prepared if it looks likely; else drafts anew."""

    def go_on(
        self, round_: int, emitted: Sequence[int], size: DraftSize, feedback: Any
    ) -> Steps[AheadDraft]:
        prepared = self._prepared
        for one in () if prepared is None else prepared._all:
            if one.draft is not None and one.draft.token_ids[0] == 2:
                one.outcome = RoundOutcome((), 0.0)
        return (yield from super().go_on(round_, emitted, size, feedback))


class DraftsOn(Ahead):
    """Goes on with the draft that it was to confirm, whatever was emitted."""

    def go_on(
        self, round_: int, emitted: Sequence[int], size: DraftSize, feedback: Any
    ) -> Steps[AheadDraft]:
        prepared = self._prepared
        if prepared is not None and prepared._all:
            likeliest = prepared._all[0]
            likeliest.outcome = RoundOutcome(tuple(emitted), 1.0)
            prepared._all = [likeliest]
        return (yield from super().go_on(round_, emitted, size, feedback))


@pytest.mark.parametrize("mutant", [LooksGood, DraftsOn])
def test_a_choice_by_what_was_drafted_is_seen(mutant: type[Ahead]) -> None:
    assert PreparedDrafts(made("model", 0, zeros=False, length=3), ALL, mutant).error(MANY) > SEEN


@pytest.mark.parametrize("name", ["model", "tree"])
def test_a_stale_branch_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ForkedCache, "adopt", lambda fork: fork.real.keep(fork.path[:1]))
    prepared = PreparedDrafts(made(name, 1, zeros=True, length=3), ALL)
    assert prepared.error(MANY) > SEEN


def test_what_is_not_forgotten_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare.Preparation, "forget", lambda prepared: None)
    prepared = PreparedDrafts(made("model", 1, zeros=True, length=3), ALL)
    with pytest.raises(AssertionError):
        assert prepared.error(MANY) < TOLERANCE

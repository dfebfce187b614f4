"""A seed has one text, with and without prepared drafts, however far these came."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from drafter_svc.settings import DrafterSettings
from tandem.drafting.ahead.outcomes import RoundOutcome
from tandem.drafting.ahead.prepare import Preparation
from tandem.drafting.methods import METHODS
from tandem.speculation.prepared_outcome import PreparedOutcome
from tandem.speculation.request.sampling import Sampling
from tests.support.laws.suited import rules_for
from tests.support.models.tiny import (
    MANY,
    make_method,
    make_target,
    random_llama,
    running,
    speculate,
)

OTHERS = pytest.mark.campaign(
    "a seed's text is the same with prepared drafts, with every rule",
    "each method with one rule (this file); `model` and `tree` enumerated (test_prepared_law.py)",
)

pytestmark = pytest.mark.real_time  # the engine has its thread

PROMPT = [1, 2, 3]
SAMPLED = Sampling(temperature=0.8, seed=5)
# Those that a model drafts, without news of the target.
AHEAD = ("model", "tree", "chains", "forest")
GREEDY = Sampling(temperature=0)
# Each method once, and greedy texts of one; the others are campaigns.
FIRST = [(name, "block", SAMPLED) for name in AHEAD] + [("model", "block", GREEDY)]
CASES = [
    pytest.param(*case, marks=() if case in FIRST else OTHERS)
    for name in AHEAD
    for rule in rules_for(METHODS[name].drafter)
    for sampling in (SAMPLED, GREEDY)
    for case in [(name, rule.name, sampling)]
]


async def text_of(
    name: str, rule: str, sampling: Sampling, nodes: int, passes: int = MANY, **keys: Any
) -> tuple[list[int], Counter[PreparedOutcome | None]]:
    """A text, and what became of prepared drafts; each preparation is left behind random many
    passes, at most `passes`."""
    target = make_target(random_llama(1))
    drafter = make_method(name, DrafterSettings(max_nodes=6, chains=2, **keys))
    drafter.ahead_nodes = nodes
    chance = random.Random(7)
    if passes < MANY:
        drafter.steps_ahead = lambda: chance.randint(0, passes)
    budget = 6 if drafter.drafter.traits.largest_tree else 0
    async with running(target, drafter):
        text = await speculate(
            drafter, target, PROMPT, 60, gamma=3, budget=budget, rule=rule, sampling=sampling
        )
    return text.token_ids, Counter(drafter.came)


async def test_numbers_of_another_round_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Preparation._begin

    def late(self: Preparation, *args: Any) -> Any:
        self.round_ += 1
        try:
            return begin(self, *args)
        finally:
            self.round_ -= 1

    plain, _ = await text_of("model", "block", SAMPLED, 0)
    monkeypatch.setattr(Preparation, "_begin", late)
    other, came = await text_of("model", "block", SAMPLED, 60)
    assert came[PreparedOutcome.HIT] > 0
    assert other != plain


async def test_no_outcome_has_a_token_that_the_target_has_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its vocabulary may be padded less."""
    outcomes: list[RoundOutcome] = []
    begin = Preparation._begin

    def noted(self: Preparation, copied: Any, forks: Any, outcome: RoundOutcome) -> Any:
        outcomes.append(outcome)
        return begin(self, copied, forks, outcome)

    monkeypatch.setattr(Preparation, "_begin", noted)
    target, drafter = make_target(random_llama(1, 3)), make_method("model")
    drafter.ahead_nodes = 60
    async with running(target, drafter):
        await speculate(drafter, target, [1, 2], 30, gamma=3, sampling=SAMPLED)
    assert len(outcomes) > 20
    assert {token for one in outcomes for token in one.token_ids} == {0, 1, 2}


@pytest.mark.parametrize(("name", "rule", "sampling"), CASES)
async def test_what_was_prepared_changes_no_token(name: str, rule: str, sampling: Sampling) -> None:
    plain, none = await text_of(name, rule, sampling, 0)
    assert not none
    whole, came = await text_of(name, rule, sampling, 60)
    assert whole == plain
    assert came[PreparedOutcome.HIT] > 3
    assert came[PreparedOutcome.MISS] > 0
    cut, came = await text_of(name, rule, sampling, 60, passes=3)
    assert cut == plain
    assert came[PreparedOutcome.LATE] > 1


async def test_a_text_learns_its_threshold_from_prepared_drafts_too() -> None:
    """Else later drafts would end at other tokens, and the text would be another one."""
    keys: dict[str, Any] = {"stop": "adaptive", "threshold": 0.3}
    plain, _ = await text_of("model", "block", SAMPLED, 0, **keys)
    found, came = await text_of("model", "block", SAMPLED, 60, **keys)
    assert came[PreparedOutcome.HIT] > 3
    assert found == plain

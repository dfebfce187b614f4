"""Drafts that end early are exact, whatever decides where they end; and where they do end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from drafter_svc.settings import DrafterSettings
from tandem.drafting.choice.built_in import built_in
from tandem.drafting.stop import Stop
from tandem.engine.asks import Draw, ReadTokens, Steps, Truncation
from tandem.engine.numbers.draws import draw
from tandem.engine.numbers.home import tokens_of
from tandem.inference.feed import Feed
from tandem.speculation.draft import Draft
from tandem.speculation.randomness import Purpose, RandomNumbers, digits
from tandem.speculation.request.sampling import Sampling
from tandem.verification import VERIFIERS
from tests.support.laws.methods import Enumeration
from tests.support.laws.suited import rules_for
from tests.support.laws.tables import Table, cache_of, scorers_of

TOLERANCE = 1e-12
LENGTH, GAMMA, NODES = 4, 3, 6
DEPTHS = ((0.7, 0.3),) * 3


def made(name: str, rule: str, seed: int = 1, length: int = LENGTH, **keys: Any) -> Enumeration:
    keys = {"max_nodes": NODES, "chains": 2, "acceptance": (0.7, 0.3, 0.2), **keys}
    if name in ("hydra", "eagle"):
        keys.pop("acceptance")
    recipe = built_in(name, DrafterSettings(stop=rule, threshold=0.45, **keys))
    scorers = scorers_of(recipe, LENGTH + GAMMA, 10 * seed + 1, zeros=True, depths=DEPTHS)
    drafter = recipe.make(scorers, Truncation(1.0, 0))
    target = Table(LENGTH + GAMMA, 10 * seed, zeros=True)
    return Enumeration(drafter, len(scorers), target, length, GAMMA, NODES)


@pytest.mark.parametrize("rule", ["confidence", "adaptive"])
@pytest.mark.parametrize("name", ["model", "tree", "chains", "forest", "hydra", "eagle"])
def test_drafts_that_end_early_leave_the_law_as_it_is(
    name: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rule == "adaptive":  # steps that matter within a text
        monkeypatch.setattr("tandem.drafting.stop._STEP", 3.0)
    enumeration = made(name, rule)
    assert not enumeration.drafter.traits.pure
    rules = rules_for(enumeration.drafter)
    assert len(rules) >= 2
    for each in rules:
        assert enumeration.error(each) < TOLERANCE, each.name
    asked = [(found.asked, draft) for found in enumeration.outcomes for draft in found.drafts]
    depths = {draft.depth for most, draft in asked if most == GAMMA}
    assert len(depths) > 1, "all drafts are alike"


def test_the_adaptive_threshold_is_part_of_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.drafting.stop._STEP", 3.0)
    enumeration = made("model", "adaptive", 2)
    enumeration.error(VERIFIERS["token"])
    # After the same text, other drafts by what was kept before.
    by_text: dict[Any, set[tuple[float, ...]]] = {}
    for found in enumeration.outcomes:
        by_text.setdefault(found.text, set()).add(tuple(found.weights))
    assert any(len(laws) > 1 for laws in by_text.values())


def test_a_weak_token_that_is_withdrawn_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    enumeration = made("model", "confidence")
    own: Any = enumeration.drafter.draft

    def draft(sequence: Any, round_: int, gamma: int, budget: int) -> Steps[Draft]:
        found: Draft = yield from own(sequence, round_, gamma, budget)
        return found.first(len(found) - 1) if len(found) < gamma else found

    monkeypatch.setattr(enumeration.drafter, "draft", draft)
    assert enumeration.error(VERIFIERS["token"]) > 1e-3


def test_a_draft_ends_behind_the_first_weak_token() -> None:
    enumeration = made("model", "confidence", length=3)
    enumeration.law(VERIFIERS["token"])
    for found in enumeration.outcomes:
        for draft in found.drafts:
            shares = []
            for node, size in enumerate(draft.sizes):
                entries = slice(sum(draft.sizes[:node]), sum(draft.sizes[: node + 1]))
                row = dict(
                    zip(draft.ids[entries].tolist(), draft.weights[entries].tolist(), strict=True)
                )
                share = row[draft.token_ids[node]] / sum(row.values()) if size else 1.0
                shares.append(share)
            assert all(share >= 0.45 for share in shares[:-1])
            assert draft.depth == found.asked or shares[-1] < 0.45


def test_the_threshold_moves_as_in_draft_and_verify() -> None:
    threshold = Stop("adaptive", 0.5).begin()
    for kept, drafted, asked, rate, value in (
        (4, 4, 4, 0.95, 0.5),  # all were kept, at full depth
        (3, 3, 4, 0.975, 0.499),  # all were kept, and it stopped early
        (0, 4, 4, 0.4875, 0.5),  # too few were kept
        (9, 2, 4, 0.74375, 0.501),  # a kept token more than there were is none
    ):
        threshold.drafted, threshold.asked = drafted, asked
        threshold.learn(kept)
        assert threshold.rate == pytest.approx(rate)
        assert threshold.value == pytest.approx(value)
    threshold.learn(0)  # nothing was drafted
    assert threshold.value == pytest.approx(0.501)
    fixed = Stop("confidence", 0.5).begin()
    fixed.drafted = 4
    fixed.learn(0)
    assert fixed.value == 0.5
    for end, kept in ((1.0, 0), (0.0, 4)):
        threshold.value = end
        for _ in range(50):
            threshold.drafted, threshold.asked = 4, 5
            threshold.learn(kept)
        assert 0.0 <= threshold.value <= 1.0


def test_greedy_tokens_have_the_models_own_probability() -> None:
    """Beside a sampled text in one batch, whose shares are those of its row."""
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 2.0, 1.0], [1.0, 0.0, 2.0]])
    numbers = RandomNumbers(1, Purpose.DRAFT, digits)
    greedy = Draw(
        None,  # type: ignore[arg-type]
        Feed(cache_of(4), [0], 1),
        Sampling(temperature=0.0),
        Truncation(1.0, 0),
        3,
        numbers,
        1,
        0,
        1,
        confident=True,
    )
    sampled = replace(greedy, sampling=Sampling(temperature=0.5, seed=3))
    plain = replace(greedy, confident=False)
    asks = [greedy, sampled, plain]
    drawn = draw(asks, logits, [0, 1, 2])
    shares = tokens_of([ReadTokens([*one], shares=True) for one in drawn])
    assert shares[0] == [pytest.approx(float(logits[0].softmax(-1)[0]))]
    law = (logits[1] / 0.5).softmax(-1)
    (token,) = tokens_of([ReadTokens(drawn[1])])[0]
    assert shares[1] == [pytest.approx(float(law[token]), abs=1e-4)]
    assert shares[2] == [1.0]
    alone = draw([greedy], logits[:1], [0])
    assert tokens_of([ReadTokens(alone[0], shares=True)]) == [shares[0]]


def test_a_head_that_grows_by_confidence_may_end_early_too() -> None:
    enumeration = made("eagle", "confidence", grow="confidence")
    for rule in ("token", "block"):
        assert enumeration.error(VERIFIERS[rule]) < TOLERANCE
    asked = [(found.asked, draft) for found in enumeration.outcomes for draft in found.drafts]
    assert len({draft.depth for most, draft in asked if most == GAMMA}) > 1

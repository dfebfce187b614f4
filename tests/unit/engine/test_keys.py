"""Every random number is used once: in draws, acceptance and residual, by every method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drafter_svc.settings import DrafterSettings
from tandem.drafting.choice.built_in import built_in
from tandem.drafting.methods import METHODS
from tandem.engine.asks import Decide, Draw
from tandem.engine.numbers import decisions, draws
from tandem.speculation.randomness import Purpose, VerdictNumbers
from tandem.speculation.request.sampling import Sampling
from tests.support.laws.keys import Keys, recorded
from tests.support.laws.suited import tried_rules
from tests.support.models.tiny import (
    Text,
    make_method,
    make_target,
    random_llama,
    running,
    speculate,
)

pytestmark = pytest.mark.real_time  # the engine has its thread

PROMPT = [1, 2, 3]
# Whose parts have numbers of their own.
COMPOSED = ("cascade", "horizontal", "phrases")
CASES = [
    (name, rule.name)
    for name in METHODS
    for rule in tried_rules(name)
    if not rule.needs_every_draft  # the texts below may end in the middle of a draft
]


async def keys_of(
    name: str, rule: str, monkeypatch: pytest.MonkeyPatch, recipe: str = ""
) -> tuple[Keys, Text]:
    """Of a whole text by a method's built-in recipe, or by a recipe's file."""
    drafter = make_method(name, DrafterSettings(recipe=recipe) if recipe else None)
    states_of = "last" if drafter.drafter.traits.feedback.layers else "none"
    probe_tokens = 8 if drafter.drafter.traits.feedback.probes else 0
    target = make_target(random_llama(1), states_of=states_of, probe_tokens=probe_tokens)
    with recorded(monkeypatch) as keys:
        async with running(target, drafter):
            text = await speculate(
                drafter,
                target,
                PROMPT,
                40,
                gamma=3,
                budget=9 if drafter.drafter.traits.largest_tree else 0,
                rule=rule,
                sampling=Sampling(seed=11),
            )
    return keys, text


@pytest.mark.parametrize(("name", "rule"), CASES)
async def test_no_number_comes_twice(name: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, text = await keys_of(name, rule, monkeypatch)
    assert keys.repeated == []
    assert text.rounds > 5
    assert keys.rows(Purpose.ACCEPT) == text.drafted
    assert keys.rows(Purpose.RESIDUAL) == text.rounds + 1
    parts = sum(keys.rows(purpose, of_parts=True) for purpose in Purpose)
    assert (parts > 0) == (name in COMPOSED)
    if built_in(name, DrafterSettings()).checkpoints and name not in COMPOSED:
        # At least one number per drafted token; unused ones are allowed.
        assert keys.rows(Purpose.DRAFT) >= text.drafted > 0


NESTED = """
method = "cascade"
tokens = 3
[inner]
method = "horizontal"
tokens = [1]
[[inner.parts]]
method = "cascade"
tokens = 2
[inner.parts.inner]
method = "model"
[[inner.parts]]
method = "model"
"""


@pytest.mark.parametrize("cut", ["fixed", "round"])
async def test_the_parts_of_a_recipe_share_no_number(
    cut: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "nested.toml"
    file.write_text(NESTED.replace("tokens = 2", f'tokens = 2\ncut = "{cut}"'))
    keys, text = await keys_of("cascade", "block", monkeypatch, str(file))
    assert keys.repeated == []
    assert keys.rows(Purpose.ACCEPT) == text.drafted
    for purpose in Purpose:
        assert keys.rows(purpose, of_parts=True) > text.rounds


async def test_one_number_for_inner_and_outer_acceptance_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = VerdictNumbers.of
    monkeypatch.setattr(VerdictNumbers, "of", lambda seed, part=0: own(seed))
    keys, _ = await keys_of("cascade", "block", monkeypatch)
    assert {key[0] for key in keys.repeated} == {Purpose.ACCEPT, Purpose.RESIDUAL}


def _one_for_siblings(asks: Sequence[Draw], siblings: int) -> np.ndarray:
    values = _OWN_DIGITS(asks, siblings)
    values[:, 1:] = np.where(values[:, 1:] > 0, values[:, :1], 0)
    return values


def _one_for_cousins(asks: Sequence[Draw], siblings: int) -> np.ndarray:
    values = _OWN_DIGITS(asks, siblings)
    return np.where(values > 0, values[:1], 0)


def _one_to_accept(asks: Sequence[Decide], gamma: int) -> np.ndarray:
    values = _OWN_UNIFORMS(asks, gamma)
    values[:, :gamma] = np.where(values[:, :gamma] < 1, values[:, :1], 1)
    return values


_OWN_DIGITS, _OWN_UNIFORMS = draws._digits, decisions._uniforms


@pytest.mark.parametrize("name", ["tree", "chains", "forest", "medusa"])
@pytest.mark.parametrize(
    ("module", "part", "mutant"),
    [
        (draws, "_digits", _one_for_siblings),
        (draws, "_digits", _one_for_cousins),
        (decisions, "_uniforms", _one_to_accept),
    ],
)
async def test_one_number_for_several_is_seen(
    name: str, module: Any, part: str, mutant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, part, mutant)
    keys, _ = await keys_of(name, "block", monkeypatch)
    assert keys.repeated

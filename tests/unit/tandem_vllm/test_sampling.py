"""What drafts are drawn by, from vLLM's parameters."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.speculation.request.shaping import NO_SHAPING, Grammar, GrammarKind
from tandem_vllm.sampling import sampling_of

PLAIN = {
    "temperature": 0.8,
    "top_k": -1,
    "top_p": 0.9,
    "min_p": 0.0,
    "seed": 5,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "structured_outputs": None,
}


def params(**own: Any) -> Any:
    return SimpleNamespace(**{**PLAIN, **own})


def structured(**own: Any) -> Any:
    return SimpleNamespace(**{"json": None, "regex": None, **own})


def test_a_plain_request() -> None:
    found = sampling_of(params())
    assert (found.temperature, found.top_k, found.top_p, found.min_p) == (0.8, 0, 0.9, 0.0)
    assert found.shaping == NO_SHAPING


def test_a_seed_gives_another_one_and_always_the_same() -> None:
    """vLLM draws by the request's own."""
    seeds = {seed: sampling_of(params(seed=seed)).seed for seed in (0, 5, -1, 2**63)}
    assert seeds == {seed: sampling_of(params(seed=seed)).seed for seed in seeds}
    assert len({*seeds, *seeds.values()}) == 2 * len(seeds)
    assert sampling_of(params(seed=None)).seed != sampling_of(params(seed=None)).seed


@pytest.mark.parametrize(
    ("wanted", "grammar"),
    [
        (structured(json={"type": "array"}), Grammar(GrammarKind.JSON_SCHEMA, '{"type": "array"}')),
        (structured(json='{"a": 1}'), Grammar(GrammarKind.JSON_SCHEMA, '{"a": 1}')),
        (structured(regex="a+"), Grammar(GrammarKind.REGEX, "a+")),
        (structured(choice=["a"]), None),
    ],
)
def test_drafts_keep_to_what_the_text_keeps_to(wanted: Any, grammar: Grammar | None) -> None:
    assert sampling_of(params(structured_outputs=wanted)).shaping.grammar == grammar


def test_a_text_that_reasons_first_is_not_held_to_its_grammar_yet() -> None:
    wanted = params(structured_outputs=structured(json="{}"), presence_penalty=1.0)
    shaping = sampling_of(wanted, with_grammar=False).shaping
    assert (shaping.grammar, shaping.presence_penalty) == (None, 1.0)


def test_penalties_are_a_drafts_too() -> None:
    shaping = sampling_of(params(repetition_penalty=1.3, presence_penalty=-1.0)).shaping
    assert (shaping.repetition_penalty, shaping.presence_penalty) == (1.3, -1.0)


def test_what_no_drafter_takes_is_left_out() -> None:
    long = structured(json=json.dumps({"enum": ["x" * 70_000]}))
    assert sampling_of(params(structured_outputs=long)).shaping == NO_SHAPING
    assert sampling_of(params(repetition_penalty=1e6)).shaping == NO_SHAPING

"""What bodies of HTTP calls become, and what is refused of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from orchestrator.front.http.bodies.completion import CompletionBody
from orchestrator.front.http.bodies.reading import read
from tandem.errors import InvalidRequest
from tandem.speculation.request.sampling import MAX_SEED


def completion(**fields: Any) -> CompletionBody:
    return read(CompletionBody, json.dumps({"prompt": "x", **fields}).encode())


def seeds(count: int = 1, **fields: Any) -> list[int]:
    body = completion(**fields)
    return [body.request("x", choice, "id").sampling.seed for choice in range(count)]


@pytest.mark.parametrize("fields", [{}, {"seed": None}, {"seed": -1}])
def test_a_seed_is_drawn_for_each_text_that_names_none(fields: dict[str, Any]) -> None:
    assert len({*seeds(3, **fields), *seeds(3, **fields)}) == 6


def test_texts_of_a_call_have_the_seeds_that_follow() -> None:
    assert seeds(2, seed=5) == [5, 6]
    assert seeds(3, seed=MAX_SEED - 1) == [MAX_SEED - 1, MAX_SEED, 0]


@pytest.mark.parametrize("seed", [-2, MAX_SEED + 1, MAX_SEED + 6, 5 - 2**64])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(InvalidRequest, match=r"^seed: "):
        completion(seed=seed)


def test_a_completion_has_openais_default_where_it_names_no_limit() -> None:
    for fields, named in (({}, None), ({"max_tokens": None}, None), ({"max_tokens": 9}, 9)):
        asked = completion(**fields).request("x", 0, "id")
        assert (asked.max_new_tokens, asked.default_new_tokens) == (named, 16)

"""The text itself as a store: what followed its last tokens before."""

from __future__ import annotations

import random

import pytest

from tandem.retrieval.prompt import PromptStore


@pytest.mark.parametrize("seed", range(10))
def test_it_finds_every_earlier_place_the_longest_match_first(seed: int) -> None:
    rng = random.Random(seed)
    text = [rng.randrange(3) for _ in range(rng.randint(1, 60))]
    longest = rng.randint(1, 6)
    expected = []
    for length in range(min(longest, len(text) - 1), 0, -1):
        tail = text[-length:]
        ends = [i for i in range(length, len(text)) if text[i - length : i] == tail]
        if ends:
            rows = [text[end : end + 3] for end in ends]
            padded = [row + [-1] * (3 - len(row)) for row in rows]
            expected.append(padded[::-1])
    found = [rows.tolist() for rows in PromptStore(longest, 1000).continuations(text, 3)]
    assert found == expected


def test_only_the_window_is_searched_and_the_latest_places_are_taken() -> None:
    text = [5, 6] + [1, 2] * 100 + [5]
    assert not list(PromptStore(4, 100).continuations(text, 2))
    assert [rows.tolist() for rows in PromptStore(4, 1000).continuations(text, 2)] == [[[6, 1]]]
    text = [1, 7, 1, 8] * 100 + [1]
    (rows,) = PromptStore(1, 1000).continuations(text, 1)
    assert len(rows) == 64
    assert rows[:2, 0].tolist() == [8, 7]


def test_a_single_token_has_no_match() -> None:
    assert not list(PromptStore(4, 100).continuations([1], 2))

"""Texts are known again by what they were."""

from __future__ import annotations

import numpy as np

from tandem_vllm.rows import TextsOfRows

LONGEST = 64


class Batch:
    """Rows as vLLM keeps them."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []
        self.known = TextsOfRows(4, LONGEST)

    def match(self, sampled: list[list[int]]) -> tuple[dict[int, str], list[str], list[str]]:
        """By row the names of known texts, those of new ones, and of ended ones."""
        token_ids = np.zeros((len(self.texts), LONGEST), dtype=np.int32)
        for row, (text, new) in enumerate(zip(self.texts, sampled, strict=True)):
            text += new
            token_ids[row, : len(text)] = text
        lengths = np.array([len(text) for text in self.texts], dtype=np.int32)
        found = self.known.match(sampled, lengths, token_ids)
        for row, ask in found.asks.items():
            assert ask.token_ids == sampled[row]
            assert ask.gamma == min(4, LONGEST - len(self.texts[row]))
        names = {row: ask.name for row, ask in found.asks.items()}
        return names, [opening.name for opening in found.openings], found.ended


def test_rows_may_change_places() -> None:
    batch = Batch()
    batch.texts = [[1, 2], [3, 4], [5]]
    asks, (first, second, third), _ = batch.match([[7], [8], [9]])
    assert asks == {}
    batch.texts = [batch.texts[2], batch.texts[0], batch.texts[1]]
    asks, opened, _ = batch.match([[1, 1], [2], [3]])
    assert (asks, opened) == ({0: third, 1: first, 2: second}, [])


def test_equal_texts_have_a_sequence_each() -> None:
    batch = Batch()
    batch.texts = [[1, 2], [1, 2]]
    _, opened, _ = batch.match([[3], [3]])
    assert len(set(opened)) == 2
    asks, opened_now, _ = batch.match([[4], [5]])
    assert sorted(asks.values()) == sorted(opened)
    assert opened_now == []
    again, _, _ = batch.match([[6], [6]])
    assert again == asks


def test_the_middle_of_a_prompt_and_a_full_text_are_left_alone() -> None:
    batch = Batch()
    batch.texts = [[1] * 10, [2] * (LONGEST - 1)]
    assert batch.match([[], [2]]) == ({}, [], [])


def test_a_text_that_is_left_out_for_a_while_is_known_again() -> None:
    batch = Batch()
    batch.texts = [[1], [2]]
    _, (first, second), _ = batch.match([[3], [4]])
    left_out = batch.texts.pop(0)
    for _ in range(5):
        batch.match([[4]])
    batch.texts = [batch.texts[0], left_out]
    asks, opened, ended = batch.match([[4], [3, 3]])
    assert (asks, opened, ended) == ({0: second, 1: first}, [], [])


def test_a_text_that_is_over_is_ended() -> None:
    batch = Batch()
    batch.texts = [[1], [2]]
    _, (first, _), _ = batch.match([[3], [4]])
    batch.texts.pop(0)
    ended = [name for _ in range(40) for name in batch.match([[4]])[2]]
    assert ended == [first]

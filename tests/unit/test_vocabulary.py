"""Which token tells two vocabularies apart."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from tandem.tools.local.pair import difference_of
from tandem.vocabulary import difference


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        ({"a": 0, "b": 1}, {"b": 1, "a": 0}, ""),
        (
            {"a": 0, "b": 1, "c": 2},
            {"a": 0, "x": 1, "y": 2},
            "id 1 is 'b' in one and 'x' in the other, of 3 and 3 tokens",
        ),
        (
            {"a": 0},
            {"a": 0, "b": 7},
            "id 7 is no token in one and 'b' in the other, of 1 and 2 tokens",
        ),
    ],
)
def test_the_first_token_that_differs_is_named(
    one: dict[str, int], other: dict[str, int], told: str
) -> None:
    assert difference(one, other) == told


def test_checkpoints_are_compared_where_both_are_here(tmp_path: Path) -> None:
    for name, letters in (("one", "abc"), ("other", "abd")):
        (tmp_path / name).mkdir()
        vocabulary = {letter: i for i, letter in enumerate(letters)}
        Tokenizer(models.BPE(vocabulary, [])).save(str(tmp_path / name / "tokenizer.json"))
    folders = [str(tmp_path / "one"), str(tmp_path / "other")]
    assert difference_of(folders).startswith("id 2 is 'c' in one and 'd' in the other")
    assert difference_of([folders[0], "an/id"]) == difference_of([folders[0]] * 2) == ""

"""Which texts are held out."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest

from tandem.online import holdout
from tandem.online.holdout import Holdout

Tokens = npt.NDArray[np.uint32]


class Texts:
    """Of random tokens, the same ones each time."""

    def __init__(self) -> None:
        self.numbers = np.random.default_rng(0)

    def __call__(self, count: int, begin: Tokens | None = None) -> Tokens:
        own = self.numbers.integers(1000, size=count).astype(np.uint32)
        return own if begin is None else np.concatenate([begin, own])


@pytest.fixture
def tokens() -> Texts:
    return Texts()


def sides(texts: list[Tokens]) -> list[bool]:
    chosen = Holdout()
    return [chosen.takes(text) for text in texts]


@pytest.mark.parametrize("length", [5, 64, 300])
def test_one_text_of_eight(tokens: Texts, length: int) -> None:
    texts = [tokens(length) for _ in range(4000)]
    assert 400 < sum(sides(texts)) < 600
    assert sides(texts) == sides(texts)


@pytest.mark.parametrize("share", [1.0, 0.6, 0.1])
@pytest.mark.parametrize("prompt", [70, 200, 600])
def test_texts_behind_a_system_prompt_are_on_both_sides(
    tokens: Texts, prompt: int, share: float
) -> None:
    """Whatever else is served, and on whichever side the prompt itself would be."""
    for _ in range(2):
        begin = tokens(prompt)
        behind = tokens.numbers.random(2560) < share
        found = np.array(sides([tokens(100, begin if own else None) for own in behind]))
        # The first ones are on one side, before it is known that they are many.
        later = found[behind][20:]
        assert len(later) / 32 < later.sum() < len(later) / 3


def test_turns_of_a_chat_are_on_one_side(tokens: Texts) -> None:
    """Also after a system prompt that all chats have, but for the first of them."""
    for begin, first in ((None, 0), (tokens(200), 16)):
        chats = [tokens(80, begin) for _ in range(40)]
        found: Counter[tuple[int, bool]] = Counter()
        chosen = Holdout()
        for _ in range(8):
            for number, chat in enumerate(chats):
                found[number, chosen.takes(chat)] += 1
                chats[number] = np.concatenate([chat, tokens(60)])
        after = range(first, 40)
        assert not [number for number in after if found[number, True] and found[number, False]]


def test_what_is_counted_is_bounded(tokens: Texts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdout, "_COUNTED", 50)
    chosen = Holdout()
    for _ in range(200):
        chosen.takes(tokens(70))
    assert len(chosen._begun) == 50
    long = tokens(100_000)
    assert len({chosen.takes(long) for _ in range(100)}) <= 2

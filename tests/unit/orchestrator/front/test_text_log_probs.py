"""Which log probabilities are told, and at which characters of the text."""

from __future__ import annotations

from orchestrator.front.http.log_probs import TextLogProbs
from tandem.peers.text.values import EmittedToken, Origin, Round
from tandem.speculation.request.log_probs import TokenLogProb

LOG_PROB = TokenLogProb(-1.0)


def round_of(*begins: int | None, prompt: int = 0) -> Round:
    """A round of tokens that begin there, after a prompt of so many tokens."""
    tokens = [
        EmittedToken(100 + place, Origin.ACCEPTED, "", 0, LOG_PROB, begin)
        for place, begin in enumerate(begins)
    ]
    told = [(place, LOG_PROB if place else None) for place in range(prompt)]
    return Round(0, tokens, 0, 0, prompt_log_probs=told)


def test_tokens_are_told_once_their_text_is_sent() -> None:
    told = TextLogProbs((), 0, has_text=True)
    told.add(round_of(0, 3, 3, 4))
    assert [each.begin for each in told.within(0)] == []
    assert [each.begin for each in told.within(3)] == [0], "a character that is not whole yet"
    told.add(round_of(9))
    assert [each.begin for each in told.within(5)] == [3, 3, 4]
    assert [each.begin for each in told.within(9)] == [], "cut off after a stop string"


def test_what_is_no_text_has_no_entry() -> None:
    told = TextLogProbs((), 0, has_text=True)
    told.add(round_of(0, None, 1, None))
    assert [each.token_id for each in told.within(99)] == [100, 102]


def test_an_echoed_prompt_comes_before() -> None:
    told = TextLogProbs((None, 0, 2), 5, has_text=True)
    told.add(round_of(0, 1, prompt=3))
    found = told.within(99)
    assert [(each.token_id, each.begin) for each in found] == [(1, 0), (2, 2), (100, 5), (101, 6)]


def test_without_a_tokenizer_all_are_told() -> None:
    told = TextLogProbs((), 0, has_text=False)
    told.add(round_of(0, 0, prompt=2))
    assert [each.token_id for each in told.within(0)] == [0, 1, 100, 101]

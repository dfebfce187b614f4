"""Shaped logits beside Hugging Face's processors, and beside the text that they belong to."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from tandem.shaping.logits import shape
from tandem.shaping.text import ShapedText
from tandem.speculation.request.shaping import MOST_BIASED, Shaping

VOCAB_SIZE = 70  # no multiple of 32
PROMPT = (3, 5, 5, 69)
TEXT = (7, 5, 11, 7)


def rows(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, VOCAB_SIZE, generator=generator) * 3


def text_of(shaping: Shaping, text: Sequence[int] = TEXT) -> ShapedText:
    shaped = ShapedText(shaping, VOCAB_SIZE, PROMPT)
    shaped.extend(text)
    return shaped


def test_it_is_what_transformers_does() -> None:
    bias = {(4,): 1.5, (5,): -2.0, (12,): 0.25}
    words = [[11, 7, 30], [7, 31], [32], [9, 33]]
    shaping = Shaping(
        logit_bias=tuple((token, value) for (token,), value in bias.items()),
        repetition_penalty=1.4,
        min_tokens=6,
        end_token_ids=(0, 2),
        bad_words=tuple(map(tuple, words)),
    )
    logits = rows(3)
    paths = [(), (9,), (9, 1)]
    found = shape(logits, [(0, text_of(shaping).rows(paths))])
    for i, path in enumerate(paths):
        ids = torch.tensor([[*PROMPT, *TEXT, *path]])
        expected = logits[i : i + 1]
        for process in (
            SequenceBiasLogitsProcessor(bias),
            RepetitionPenaltyLogitsProcessor(1.4),
            NoBadWordsLogitsProcessor(words, eos_token_id=None),
            MinNewTokensLengthLogitsProcessor(len(PROMPT), 6, [0, 2]),
        ):
            expected = process(ids, expected)
        assert torch.equal(found[i].isinf(), expected[0].isinf())
        assert torch.allclose(found[i], expected[0], atol=1e-6)


@pytest.mark.parametrize("count", [64, 65, 129, MOST_BIASED])
def test_each_bias_is_added_however_many_there_are(count: int) -> None:
    bias = tuple((token, (token % 201 - 100) / 4) for token in range(count))
    text = ShapedText(Shaping(logit_bias=bias), MOST_BIASED, PROMPT)
    found = shape(torch.zeros(1, MOST_BIASED), [(0, text.rows([()]))])
    expected = [value for _, value in bias] + [0.0] * (MOST_BIASED - count)
    assert found[0].tolist() == expected


def test_penalties_count_what_was_generated() -> None:
    shaping = Shaping(frequency_penalty=0.5, presence_penalty=0.25)
    logits = rows(2)
    found = shape(logits, [(0, text_of(shaping).rows([(), (7, 1)]))])
    for row, counts in zip((0, 1), ({7: 2, 5: 1, 11: 1}, {7: 3, 5: 1, 11: 1, 1: 1}), strict=True):
        expected = logits[row].clone()
        for token, count in counts.items():
            expected[token] -= 0.5 * count + 0.25
        assert torch.allclose(found[row], expected, atol=1e-6)


def test_texts_of_a_batch_are_apart() -> None:
    logits = rows(5)
    one = text_of(Shaping(frequency_penalty=1.0, repetition_penalty=2.0)).rows([(), (1,)])
    other = text_of(Shaping(logit_bias=((1, 5.0),), bad_words=((2,),))).rows([()])
    found = shape(logits, [(1, one), (4, other)])
    assert torch.equal(found[0], logits[0])
    assert torch.equal(found[3], logits[3])
    assert torch.equal(found[1:3], shape(logits[1:3], [(0, one)]))
    assert torch.equal(found[4:], shape(logits[4:], [(0, other)]))
    assert torch.equal(logits, rows(5)), "the pass's own logits are others' too"


def test_a_draft_leaves_no_trace() -> None:
    shaping = Shaping(frequency_penalty=1.0, bad_words=((1, 2),), logit_bias=((1, 5.0),))
    text = text_of(shaping)
    before = shape(rows(1), [(0, text.rows([()]))])
    text.rows([(), (1,), (1, 7)])
    assert torch.equal(before, shape(rows(1), [(0, text.rows([()]))]))


def test_ids_that_a_drafter_does_not_have_are_left_out() -> None:
    shaping = Shaping(logit_bias=((1, 5.0), (68, 1.0)), bad_words=((2,), (69,)))
    found = shape(rows(1)[:, :40], [(0, text_of(shaping).rows([()]))])
    assert torch.equal(found, shape(rows(1), [(0, text_of(shaping).rows([()]))])[:, :40])


def test_where_nothing_may_come_the_place_is_dead() -> None:
    words = tuple((token,) for token in range(VOCAB_SIZE) if token != 4)
    text = text_of(Shaping(min_tokens=5, end_token_ids=(4,), bad_words=words))
    shaped = text.rows([(), (1,)])
    assert shaped.dead == [True, False]
    found = shape(rows(2), [(0, shaped)])
    assert found[0].isfinite().all(), "its row is nobody's, and finite"
    assert found[1].isfinite().nonzero().tolist() == [[4]]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"logit_bias": ((1, 101.0),)}, "logit_bias must be -100..100"),
        ({"logit_bias": ((1, float("nan")),)}, "logit_bias must be -100..100"),
        ({"logit_bias": tuple((i, 0.0) for i in range(MOST_BIASED + 1))}, "logit_bias may hold"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be 0.01..100"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty must be"),
        ({"frequency_penalty": 2.5}, "frequency_penalty must be -2..2"),
        ({"presence_penalty": float("inf")}, "presence_penalty must be -2..2"),
        ({"bad_words": ((),)}, "bad_words must have 1..64 tokens"),
        ({"bad_words": ((1,),) * 257}, "bad_words may hold 256 words"),
    ],
)
def test_a_value_out_of_range_is_refused(wrong: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}"):
        Shaping(**wrong)  # type: ignore[arg-type]

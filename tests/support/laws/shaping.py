"""What shaping means, written down a second time: by whole texts, without state."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLMatcher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tandem.shaping.grammar import Grammars
from tandem.shaping.logits import shape
from tandem.shaping.text import ShapedRows, ShapedText, shaped_text
from tandem.speculation.request.shaping import GrammarKind, Shaping

# Of the smallest vocabulary. The last one may end a text.
LETTERS = "abe"
END = 2

# All texts of the other letters, long enough for the grammars of the tests.
_LANGUAGE = ["".join(text) for n in range(8) for text in product("ab", repeat=n)]

# Matchers copy themselves; `deepcopy` asks here.
copy._deepcopy_dispatch[LLMatcher] = lambda matcher, memo: matcher.deep_copy()  # type: ignore[attr-defined]


def tokenizer_json(letters: str = LETTERS) -> bytes:
    """A tokenizer with a token for each letter."""
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.to_str().encode()


def shaped(shaping: Shaping, prompt: Sequence[int], emitted: Sequence[int] = ()) -> ShapedText:
    """A text's state over the smallest vocabulary."""
    ends = shaping.end_token_ids
    grammars = Grammars(tokenizer_json, len(LETTERS), ends)
    text = shaped_text(shaping, len(LETTERS), prompt, emitted, grammars)
    assert text is not None
    return text


def law_of(
    logits: npt.NDArray[np.float64], shaping: Shaping, prompt: Sequence[int], text: Sequence[int]
) -> npt.NDArray[np.float64] | None:
    """The distribution after a text, from the target's logits there; None where none may come."""
    scores = []
    for token, score in enumerate(logits.tolist()):
        score += dict(shaping.logit_bias).get(token, 0.0)
        if token in (*prompt, *text):
            factor = shaping.repetition_penalty
            score = score / factor if score > 0 else score * factor
        score -= shaping.frequency_penalty * list(text).count(token)
        score -= shaping.presence_penalty * (token in text)
        scores.append(score if _may_come(shaping, prompt, [*text, token]) else None)
    if not any(score is not None for score in scores):
        return None
    law: npt.NDArray[np.float64]
    law = np.exp([-math.inf if score is None else score for score in scores])
    law /= law.sum()
    return law


def _may_come(shaping: Shaping, prompt: Sequence[int], text: Sequence[int]) -> bool:
    """Whether the last token of a text may."""
    if text[-1] in shaping.end_token_ids and len(text) <= shaping.min_tokens:
        return False
    whole = [*prompt, *text]
    if any(whole[-len(word) :] == list(word) for word in shaping.bad_words):
        return False
    if shaping.grammar is None:
        return True
    assert shaping.grammar.kind is GrammarKind.REGEX
    written = "".join(LETTERS[token] for token in text)
    end = LETTERS[END] if END in shaping.end_token_ids else "$"
    complete = [text for text in _LANGUAGE if re.fullmatch(shaping.grammar.text, text)]
    return any(f"{text}{end}".startswith(written) for text in complete)


def said_of(shaped: ShapedRows) -> Any:
    """All that shaped rows are, to be hashed."""
    numbers = shaped.rows, shaped.ids, shaped.bias, shaped.seen, shaped.counts, shaped.bits
    told = tuple(None if each is None else each.tobytes() for each in numbers)
    return told, shaped.shaping, tuple(shaped.dead)


def shaped_weights(rows: npt.NDArray[np.int64], shaped: ShapedRows) -> npt.NDArray[np.int64]:
    """Integer weights [R, V] of shaped rows."""
    laws = shape(torch.from_numpy(rows).double().log(), [(0, shaped)]).softmax(-1)
    return (laws / laws.amax(-1, keepdim=True) * 59).ceil().nan_to_num(1.0).long().numpy()

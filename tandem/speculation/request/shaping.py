"""What a request changes about the target's logits before they become a distribution."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

# OpenAI's bounds.
_MOST_PENALTY, _MOST_BIAS = 2.0, 100.0
# A factor beyond these would only be infinite or 0 sooner.
_LEAST_REPETITION, _MOST_REPETITION = 0.01, 100.0
# Bounds of what a row of a pass may cost: each entry is looked at in each of them.
MOST_BIASED, MOST_BAD_WORDS, MOST_BAD_WORD, MOST_GRAMMAR = 1024, 256, 64, 65536


class GrammarKind(Enum):
    """How a grammar is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the whole text has to be.

    Attributes:
        kind: of `text`.
        text: a JSON schema, a regular expression, or a grammar in llguidance's variant of Lark.
    """

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True)
class Shaping:
    """Controls of the logits, in the order in which they apply.

    They apply at each place by the text up to there: the prompt, what was emitted, and what was
    drafted on the way to the place.

    Attributes:
        logit_bias: ids with what is added to their logits. [-100, 100] each.
        repetition_penalty: divides the logits of tokens of the prompt and the text that are
            positive, and multiplies others (CTRL, arXiv 1909.05858). [0.01, 100]; 1 for none.
        frequency_penalty: subtracted for each time that a token was generated. [-2, 2].
        presence_penalty: subtracted once for a token that was generated. [-2, 2].
        min_tokens: until this number was generated, `end_token_ids` are forbidden.
        end_token_ids: that would end the text.
        bad_words: sequences of tokens, the last of which is forbidden after the others.
        grammar: that the text keeps to; None for none.

    Raises:
        ValueError: a value is out of range; the message begins with its name.
    """

    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_tokens: int = 0
    end_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        if len(self.logit_bias) > MOST_BIASED:
            raise ValueError(f"logit_bias may hold {MOST_BIASED} ids, got {len(self.logit_bias)}")
        for token_id, bias in self.logit_bias:
            if not -_MOST_BIAS <= bias <= _MOST_BIAS:  # nor NaN
                raise ValueError(f"logit_bias must be -100..100, got {bias} for id {token_id}")
        if not _LEAST_REPETITION <= self.repetition_penalty <= _MOST_REPETITION:
            raise ValueError(
                f"repetition_penalty must be {_LEAST_REPETITION:g}..{_MOST_REPETITION:g},"
                f" got {self.repetition_penalty}"
            )
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            if not (math.isfinite(value) and abs(value) <= _MOST_PENALTY):
                raise ValueError(f"{name} must be -2..2, got {value}")
        if len(self.bad_words) > MOST_BAD_WORDS:
            raise ValueError(f"bad_words may hold {MOST_BAD_WORDS} words")
        if any(not 1 <= len(word) <= MOST_BAD_WORD for word in self.bad_words):
            raise ValueError(f"bad_words must have 1..{MOST_BAD_WORD} tokens each")
        if self.grammar is not None and len(self.grammar.text) > MOST_GRAMMAR:
            raise ValueError(f"grammar may have {MOST_GRAMMAR} characters")

    def __bool__(self) -> bool:
        """Whether it changes anything."""
        return bool(
            self.logit_bias
            or self.penalises
            or self.min_tokens
            or self.bad_words
            or self.grammar is not None
        )

    @property
    def penalises(self) -> bool:
        """Whether a logit depends on how often its token came."""
        return (
            self.repetition_penalty != 1
            or self.frequency_penalty != 0
            or self.presence_penalty != 0
        )


NO_SHAPING = Shaping()

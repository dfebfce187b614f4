"""Which tokens may come next in a text that keeps to a grammar, by llguidance."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask
from tokenizers import Tokenizer

from tandem.errors import InvalidRequest
from tandem.speculation.request.shaping import Grammar, GrammarKind

_MOST_SENTENCE = 400
_log = structlog.get_logger(__name__)

# A state of the lexer takes 2 kB. Its other bounds, of time, are llguidance's: a compilation takes
# 20 ms of fuel, and a mask 17.
_LIMITS = LLParserLimits(max_lexer_states=20_000)
# White space of JSON in one place: without a bound, a model may write nothing else up to its text's
# end. Room for the indentation of deep objects. The schema's `x-guidance` may name another.
_WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,64}"
_ALL = np.uint32(0xFFFFFFFF)
_NO_END = "<|no end of a text|>"

# Token i is bit i % 32 of number i // 32.
Bits = npt.NDArray[np.uint32]


def forbid(bits: Bits, token_ids: Iterable[int]) -> None:
    """Clear the bits [W] of tokens."""
    for token_id in token_ids:
        bits[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)


class Grammars:
    """Compiles grammars for a tokenizer. From any thread.

    Args:
        tokenizer: gives the tokenizer as JSON, once; empty where there is none.
        vocab_size: ids of the model.
        end_token_ids: of the model. One of them may come where the grammar's text is complete.
    """

    def __init__(
        self, tokenizer: Callable[[], bytes], vocab_size: int, end_token_ids: Sequence[int]
    ) -> None:
        self._read, self._vocab_size = tokenizer, vocab_size
        self._ends = tuple(end_token_ids)
        self._lock = threading.Lock()  # for the tokenizer

    def state(self, grammar: Grammar) -> GrammarState:
        """The state of a text of which nothing has come.

        Raises:
            InvalidRequest: the grammar is wrong or too large, in llguidance's words; or there is no
                tokenizer.
        """
        with self._lock:
            tokenizer = self._tokenizer
        if tokenizer is None:
            raise InvalidRequest(
                "sampling.shaping.grammar needs a model with a tokenizer of bytes, or of"
                " SentencePiece's kind"
            )
        try:
            written = _written(grammar)
        except ValueError as error:
            raise _refusal(str(error)) from None
        # Its own: copies share a lexer, and with it the bounds of all their texts. Never raises; it
        # says by itself what is wrong.
        matcher = LLMatcher(tokenizer, written, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise _refusal(matcher.get_error())
        state = GrammarState(matcher, self._ends, tokenizer)
        if not state.goes_back():
            raise _refusal("it cannot go back after drafted tokens (max_tokens= and stop= of Lark)")
        return state

    def check(self, grammar: Grammar, received_ids: Sequence[int] = ()) -> None:
        """Refuse what cannot be compiled, or what was received and does not keep to it.

        Raises:
            InvalidRequest: see `state` and `GrammarState.extend`.
        """
        self.state(grammar).extend(received_ids)

    def prepare(self) -> None:
        """Read the tokenizer, so that no text waits for it. Of a large one it takes seconds."""
        with self._lock:
            _ = self._tokenizer

    @property
    def exist(self) -> bool:
        """Whether the tokenizer is one for any; to read a large one takes seconds."""
        with self._lock:
            return self._tokenizer is not None

    @cached_property
    def _tokenizer(self) -> LLTokenizer | None:
        written = self._read()
        if not written:
            return None
        # llguidance knows ends of its own alone, or guesses one. This one never comes, and those of
        # the model are set where a text is complete.
        tokenizer = Tokenizer.from_str(written.decode())
        tokenizer.add_special_tokens([_NO_END])
        end = tokenizer.token_to_id(_NO_END)
        assert end is not None  # it was added
        try:
            return LLTokenizer(tokenizer.to_str(), max(self._vocab_size, end + 1), end)
        except ValueError as error:  # such as one whose tokens are words
            _log.warning("texts cannot keep to grammars", tokenizer=str(error))
            return None


def _ids_of(bits: Bits) -> list[int]:
    """The tokens of bits [W]."""
    ids: list[int] = np.unpackbits(bits.view(np.uint8), bitorder="little").nonzero()[0].tolist()
    return ids


def _written(grammar: Grammar) -> str:
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        # The schema of any JSON may be written in two ways, one of which takes no options.
        schema = "{}" if grammar.text.strip() == "true" else grammar.text
        defaults: Any = {"whitespace_pattern": _WHITE_SPACE}
        return LLMatcher.grammar_from_json_schema(schema, defaults=defaults)
    if grammar.kind is GrammarKind.REGEX:
        return LLMatcher.grammar_from_regex(grammar.text)
    return LLMatcher.grammar_from_lark(grammar.text)


def _refusal(error: str) -> InvalidRequest:
    """With the sentence of llguidance, on one line and bounded."""
    return InvalidRequest(f"sampling.shaping.grammar: {' '.join(error.split())[:_MOST_SENTENCE]}")


class GrammarState:
    """How far a text has come in its grammar.

    Args:
        matcher: llguidance's, its own.
        ends: ids that end a complete text.
        tokenizer: of the matcher.
    """

    def __init__(self, matcher: LLMatcher, ends: Sequence[int], tokenizer: LLTokenizer) -> None:
        self._mask = np.zeros((1, -(-tokenizer.vocab_size // 32)), np.uint32)
        self._matcher, self._ends, self._no_end = matcher, frozenset(ends), tokenizer.eos_token
        self._ahead: list[int] = []  # tokens that the matcher has taken and that were not emitted
        self._over = False  # an end was emitted, or llguidance's bounds were exceeded

    def goes_back(self) -> bool:
        """Whether a token can be taken and given back, as drafted ones are."""
        known = (token_id for token_id in _ids_of(self._masked()[0]) if token_id != self._no_end)
        first = next(known, None)
        if first is None or not self._matcher.try_consume_tokens([first]):
            return True
        return self._matcher.rollback(1)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Go on after emitted tokens.

        Raises:
            InvalidRequest: one of them may not come there.
        """
        self._go(())
        for place, token_id in enumerate(token_ids, 1):
            if self._over or not self._take(token_id):
                raise InvalidRequest(
                    f"sampling.shaping.grammar: token {place} of those that were generated before,"
                    f" {token_id}, does not keep to it"
                )

    def _take(self, token_id: int) -> bool:
        """Go on after a token for good; whether it may come."""
        if token_id in self._ends and self._matcher.is_accepting():
            self._over = True
            return True
        return bool(self._matcher.try_consume_tokens([token_id]))

    def allow(self, path: Sequence[int], bits: Bits) -> None:
        """Set the bits of the tokens that may come after drafted ones: all of them where a drafted
        one may not come itself, since then no text comes so far; none where the text is over, or
        takes more than llguidance's bounds allow.

        Args:
            path: the drafted tokens.
            bits: [W].
        """
        possible = not self._over and self._go(path)
        if self._over:
            bits[:] = 0
        elif not possible:
            bits[:] = _ALL
        elif len(path) > len(self._ahead):  # after an end
            bits[:] = 0
        else:
            mask = self._masked()[0]
            known = min(len(bits), len(mask))
            bits[:known], bits[known:] = mask[:known], 0
            if self._no_end < 32 * len(bits):
                forbid(bits, [self._no_end])
            if not self._over and self._matcher.is_accepting():
                for token_id in self._ends:
                    bits[token_id // 32] |= np.uint32(1 << token_id % 32)

    def _masked(self) -> Bits:
        """[1, W] what the matcher allows next; nothing where it has failed."""
        fill_next_token_bitmask(self._matcher, self._mask.view(np.int32))
        if self._matcher.is_error():
            _log.warning("a grammar is too large for a text", reason=self._matcher.get_error())
            self._over = True
            self._mask[:] = 0
        return self._mask

    def _go(self, path: Sequence[int]) -> bool:
        """Move the matcher after a path, up to its first end; whether all of it may come."""
        common = 0
        for ours, theirs in zip(self._ahead, path, strict=False):
            if ours != theirs:
                break
            common += 1
        if common < len(self._ahead):
            self._matcher.rollback(len(self._ahead) - common)
            del self._ahead[common:]
        for place, token_id in enumerate(path[common:], common + 1):
            if token_id in self._ends and self._matcher.is_accepting():
                return place == len(path)  # nothing comes after an end
            if not self._matcher.try_consume_tokens([token_id]):
                return False
            self._ahead.append(token_id)
        return True

"""From text to token ids and back, round by round."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from tokenizers import Tokenizer

from orchestrator.text.detokenizer import Detokenizer, Vocabulary
from orchestrator.text.stop_strings import TextStream
from tandem.errors import StartupError

# Tokens whose bytes are kept: a prompt's log probabilities name as many of the likeliest.
_SPELLED = 65_536


class TextCodec:
    """The target's tokenizer, or none at all for a target without one.

    Raises:
        StartupError: these are not a tokenizer's bytes.
    """

    def __init__(self, tokenizer_json: bytes) -> None:
        self._tokenizer = _parse(tokenizer_json) if tokenizer_json else None
        self._vocabulary = Vocabulary(self._tokenizer) if self._tokenizer else None
        self._spelled = lru_cache(_SPELLED)(self._spell)

    @property
    def longest_token(self) -> int:
        """The most characters of a prompt that one token can stand for."""
        return self._vocabulary.longest_token if self._vocabulary else 0

    @property
    def has_text(self) -> bool:
        """Whether text can be encoded and decoded."""
        return self._tokenizer is not None

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids; `special` ones are what the tokenizer's own template adds, a BOS for instance.

        Gives the interpreter's lock away while it works; the library's `encode` would hold it.
        """
        assert self._tokenizer is not None
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=special)
        ids: list[int] = encoding.ids
        return ids

    def spell(self, token_ids: Sequence[int]) -> list[str]:
        """Each token by itself, for people; none without a tokenizer."""
        if self._tokenizer is None:
            return []
        decode = self._tokenizer.decode
        return [decode([token_id], skip_special_tokens=False) for token_id in token_ids]

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that a token stands for by itself; none without a tokenizer."""
        return self._spelled(token_id)

    def _spell(self, token_id: int) -> bytes:
        if self._vocabulary is None:
            return b""
        spelled = self._vocabulary.bytes_of(token_id)
        return "".join(self.spell([token_id])).encode() if spelled is None else spelled

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special ones too."""
        assert self._tokenizer is not None
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    def begins(self, prompt: str | Sequence[int]) -> list[int | None]:
        """Where each token of a prompt begins, in characters of the prompt's text; None for those
        that the tokenizer's template adds. Token ids have the text that `decode` gives."""
        assert self._tokenizer is not None
        assert self._vocabulary is not None
        found: list[int | None] = []
        end = 0
        if isinstance(prompt, str):
            (encoding,) = self._tokenizer.encode_batch([prompt])
            marks = encoding.special_tokens_mask
            for (first, behind), mark in zip(encoding.offsets, marks, strict=True):
                # Tokenizers may leave white space out, which belongs to the token after it.
                found.append(None if mark else min(first, end))
                end = max(end, behind)
            return found
        decoder = Detokenizer(self._vocabulary, (), marks=True)
        for token_id in prompt:
            found.append(end)
            end += len(decoder.push(token_id))
        return found

    def stream(self, prompt_ids: Sequence[int], stop_strings: Sequence[str]) -> TextStream:
        """A decoder of the tokens that follow a prompt."""
        decoder = Detokenizer(self._vocabulary, prompt_ids) if self._vocabulary else None
        return TextStream(decoder, stop_strings)


def _parse(tokenizer_json: bytes) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_buffer(tokenizer_json)
    except Exception as error:  # the library promises no type
        raise StartupError(f"cannot read the target's tokenizer: {error}") from error
    # A checkpoint may carry either from its training; a prompt wants neither.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer

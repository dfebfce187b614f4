"""From token ids to text, token by token; half a character is kept until it is whole."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from tokenizers import Tokenizer

# A character has at most four bytes; a few special tokens may stand between them.
_LAST_TOKENS = 8
# Tokens that the next one is decoded after: some tokenizers treat a first token (its leading
# space, for instance) in their own way.
_CONTEXT = 6
# Characters that an unknown word may have and still be a prompt's token.
_LONGEST_WORD = 1000


class Vocabulary:
    """What each token contributes to a text: bytes, a piece of text, or nothing.

    Byte-level tokenizers (GPT-2, Llama 3, Qwen) spell every token in bytes; those with byte
    fallback (Llama 2, Gemma) spell characters beyond their vocabulary as tokens of one byte.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        kinds = set(_kinds(tokenizer.decoder))
        self._byte_level = "ByteLevel" in kinds
        spelled = (
            {f"<0x{byte:02X}>": byte for byte in range(256)} if "ByteFallback" in kinds else {}
        )
        self._fallback = {
            token_id: bytes([byte])
            for token, byte in spelled.items()
            if (token_id := tokenizer.token_to_id(token)) is not None
        }
        added = tokenizer.get_added_tokens_decoder()
        self._silent = {token_id for token_id, token in added.items() if token.special}
        self._longest = max(map(len, tokenizer.get_vocab()), default=0)

    @property
    def longest_token(self) -> int:
        """The most characters of a text that one token stands for.

        A byte-level token spells each byte as a character, so none stands for more than it is
        long; a tokenizer that drops characters or calls them unknown may put any number into
        one, and a thousand are more than a word has.
        """
        return self._longest if self._byte_level else max(self._longest, _LONGEST_WORD)

    def is_silent(self, token_id: int) -> bool:
        """Whether the token is a mark for the model that no reader sees."""
        return token_id in self._silent

    def is_text(self, token_id: int) -> bool:
        """Whether the token is decoded as text, after others."""
        return not (self._byte_level or token_id in self._fallback or token_id in self._silent)

    def bytes_of(self, token_id: int) -> bytes | None:
        """The bytes that a token spells; None if it is text of its own."""
        if not self._byte_level:
            return self._fallback.get(token_id)
        token: str = self._tokenizer.id_to_token(token_id) or ""
        try:
            return bytes(_BYTES[character] for character in token)
        except KeyError:  # an added token, which stands for itself
            return token.encode()

    def mark_of(self, token_id: int) -> str:
        """How a silent token is written."""
        return self._tokenizer.id_to_token(token_id) or ""

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Decode tokens that are text of their own."""
        text: str = self._tokenizer.decode(token_ids)
        return text


class Detokenizer:
    """Decodes the tokens that follow a prompt.

    A prompt may end within a character: where a text is resumed, the client has its first
    bytes as ids but not as text. The character then comes whole with the token that ends it.

    Args:
        vocabulary: of the tokens.
        prompt_ids: before the text: its first characters may depend on them.
        marks: whether marks that no reader sees are text too.
    """

    def __init__(
        self, vocabulary: Vocabulary, prompt_ids: Sequence[int], *, marks: bool = False
    ) -> None:
        self._vocabulary, self._marks = vocabulary, marks
        # Keeps the bytes of a character that may still be completed, and nothing else.
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._context: list[int] = []
        self._known = ""
        for token_id in prompt_ids[-_LAST_TOKENS:]:
            self.push(token_id)
        texts = (token_id for token_id in reversed(prompt_ids) if vocabulary.is_text(token_id))
        self._set_context(list(islice(texts, _CONTEXT))[::-1])

    def is_text(self, token_id: int) -> bool:
        """Whether a token is in the text, or part of a character that may be."""
        return self._marks or not self._vocabulary.is_silent(token_id)

    def push(self, token_id: int) -> str:
        """The text that a token adds; what it adds of an unfinished character comes later."""
        if self._vocabulary.is_silent(token_id):
            if not self._marks:
                return ""
            return self._characters.decode(b"", final=True) + self._vocabulary.mark_of(token_id)
        spelled = self._vocabulary.bytes_of(token_id)
        if spelled is not None:
            return self._characters.decode(spelled)
        # Nothing can complete a character across a token that is text of its own.
        broken = self._characters.decode(b"", final=True)
        return broken + self._behind_context(token_id)

    def _behind_context(self, token_id: int) -> str:
        context = [*self._context, token_id]
        added = self._vocabulary.text_of(context)[len(self._known) :]
        self._set_context(context[-_CONTEXT:])
        return added

    def _set_context(self, token_ids: list[int]) -> None:
        self._context = token_ids
        self._known = self._vocabulary.text_of(token_ids)


def _kinds(decoder: Any) -> Iterator[str]:
    """The types of a decoder and of those within it."""
    if decoder is None:
        return
    pending = [json.loads(decoder.__getstate__())]
    while pending:
        description = pending.pop()
        yield description["type"]
        pending += description.get("decoders", ())


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character stands for of a byte-level token, as GPT-2 chose them.

    Printable bytes stand for themselves, the others for the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }


_BYTES = _byte_alphabet()

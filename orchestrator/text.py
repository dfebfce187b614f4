"""From text to token ids and back, round by round."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"


class TextCodec:
    """The target's tokenizer, or none at all for a target without one."""

    def __init__(self, tokenizer_json: bytes) -> None:
        self._tokenizer = Tokenizer.from_buffer(tokenizer_json) if tokenizer_json else None
        if self._tokenizer is not None:
            # A checkpoint may carry either from its training; a prompt wants neither.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()

    @property
    def has_text(self) -> bool:
        """Whether text can be encoded and decoded."""
        return self._tokenizer is not None

    def encode(self, text: str) -> list[int]:
        """Token ids, with what the tokenizer's own template adds (a BOS, for instance)."""
        assert self._tokenizer is not None
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def stream(self, prompt_ids: Sequence[int], stop_strings: Sequence[str]) -> TextStream:
        """A decoder of the tokens that follow a prompt."""
        return TextStream(self._tokenizer, prompt_ids, stop_strings)


class TextStream:
    """Turns tokens into text as they come.

    Never releases half a character, nor text that a stop string may still swallow.

    Attributes:
        stop_string: the one that came, if any; no text is released from it on.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, prompt_ids: Sequence[int], stop_strings: Sequence[str]
    ) -> None:
        self._tokenizer = tokenizer
        self._decoder = _Detokenizer(tokenizer, prompt_ids) if tokenizer else None
        self._stop_strings = stop_strings
        self._held = ""
        self.stop_string: str | None = None

    def push(self, token_id: int) -> str:
        """The text that a token releases; it may be empty."""
        if self._decoder is None:
            return ""
        self._held += self._decoder.push(token_id)
        found = [(self._held.find(stop), stop) for stop in self._stop_strings]
        found = [(place, stop) for place, stop in found if place >= 0]
        if found:
            place, self.stop_string = min(found, key=lambda hit: hit[0])
            released, self._held = self._held[:place], ""
            return released
        return self._release(len(self._held) - self._possible_stop())

    def flush(self) -> str:
        """What was held back for a stop string that did not come.

        A character that is still incomplete is dropped.
        """
        return self._release(len(self._held))

    def _release(self, count: int) -> str:
        released, self._held = self._held[:count], self._held[count:]
        return released

    def _possible_stop(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stop_strings), default=0)
        for length in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stop_strings):
                return length
        return 0


class _Detokenizer:
    """Incremental decoding: a token's text is what it adds to the decoded context.

    Decoding starts a few tokens back, since some tokenizers treat a first token (its leading
    space, for instance) in their own way.
    """

    _CONTEXT = 6

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt_ids[-self._CONTEXT :])
        self._known = self._decode()

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode()
        if text.endswith(_REPLACEMENT) and len(self._ids) < 4 * self._CONTEXT:
            return ""  # perhaps half a character; the next token tells
        added = text[len(self._known) :]
        del self._ids[: -self._CONTEXT]
        self._known = self._decode()
        return added

    def _decode(self) -> str:
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        return text

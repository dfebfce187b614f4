"""Text as tokens come, and where a stop string ends it."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.text.detokenizer import Detokenizer


class TextStream:
    """Turns tokens into text as they come.

    Never releases half a character, nor text that a stop string may still swallow.

    Attributes:
        stop_string: the one that came, if any; no text is released from it on.
    """

    def __init__(self, decoder: Detokenizer | None, stop_strings: Sequence[str]) -> None:
        self._decoder = decoder
        self._stop_strings = stop_strings
        self._held = ""
        self._decoded = 0  # characters, held ones too
        self.stop_string: str | None = None

    def place_of(self, token_id: int) -> int | None:
        """Where a token begins that comes next, in characters of the text, also if it is cut off
        later; None for one that is no text."""
        if self._decoder is not None and not self._decoder.is_text(token_id):
            return None
        return self._decoded

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """The text that a token releases; it may be empty.

        Args:
            token_id: of the next token of the text.
            may_stop: whether a stop string may end the text yet. One that does begins after the
                tokens that may not.
        """
        if self._decoder is None:
            return ""
        added = self._decoder.push(token_id)
        self._decoded += len(added)
        self._held += added
        if not may_stop:
            return self.flush()
        found = [(self._held.find(stop), stop) for stop in self._stop_strings]
        found = [(at, stop) for at, stop in found if at >= 0]
        if found:
            at, self.stop_string = min(found, key=lambda hit: hit[0])
            released, self._held = self._held[:at], ""
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

"""Which rounds are on at once: what a round takes is told from rounds among its own kind."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakSet

# Drafted rounds are little slower for a few plain ones beside them: one for so many.
_FEW = 4


class Company:
    """The plain and the drafted rounds of all texts.

    A plain round beside drafts waits for their passes. Had it been counted, plain decoding would
    seem to be slow and all texts would draft, however much faster they all were without.

    Args:
        clock: in nanoseconds.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        # Whose rounds are on. A text that fails leaves no trace.
        self._plain: WeakSet[object] = WeakSet()
        self._drafted: WeakSet[object] = WeakSet()
        # When each kind was last not by itself.
        self._plain_mixed_ns = self._drafted_mixed_ns = -1

    def enter(self, text: object, *, drafting: bool) -> None:
        """A text's round begins."""
        (self._plain if drafting else self._drafted).discard(text)
        (self._drafted if drafting else self._plain).add(text)
        self._note()

    def leave(self, text: object, began_ns: int) -> bool:
        """A text's round ends.

        Returns:
            Whether it was among its kind since it began.
        """
        self._note()
        drafting = text in self._drafted
        (self._drafted if drafting else self._plain).discard(text)
        return began_ns > (self._drafted_mixed_ns if drafting else self._plain_mixed_ns)

    def _note(self) -> None:
        plain, drafted = len(self._plain), len(self._drafted)
        if plain and drafted:
            self._plain_mixed_ns = self._clock()
            if plain * _FEW > drafted:
                self._drafted_mixed_ns = self._plain_mixed_ns

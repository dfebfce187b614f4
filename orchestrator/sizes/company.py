"""Which rounds are on at once: what a round takes is told from rounds among its own kind."""

from __future__ import annotations

from collections.abc import Callable

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
        self._plain = self._drafted = 0  # rounds that are on
        # When each kind was last not by itself.
        self._plain_mixed_ns = self._drafted_mixed_ns = -1

    def enter(self, drafting: bool) -> None:
        """A round begins."""
        if drafting:
            self._drafted += 1
        else:
            self._plain += 1
        self._note()

    def leave(self, drafting: bool, began_ns: int) -> bool:
        """A round ends, or its text with it.

        Returns:
            Whether it was among its kind since it began.
        """
        self._note()
        if drafting:
            self._drafted -= 1
            return began_ns > self._drafted_mixed_ns
        self._plain -= 1
        return began_ns > self._plain_mixed_ns

    def _note(self) -> None:
        if self._plain and self._drafted:
            self._plain_mixed_ns = self._clock()
            if self._plain * _FEW > self._drafted:
                self._drafted_mixed_ns = self._plain_mixed_ns

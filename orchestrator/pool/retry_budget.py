"""How many texts may be moved to another target: a bound on what failures add to a load."""

from __future__ import annotations

import time
from collections.abc import Callable

_WINDOW_SECONDS = 10.0
# So that a few texts can always go on.
_FLOOR = 16


class RetryBudget:
    """A share of the texts of late, and a few.

    Without it, targets that fail under load would be given all their texts again and again.

    Args:
        share: of the texts that were begun within ten seconds or are being made.
        active: how many are being made.
    """

    def __init__(self, share: float, active: Callable[[], int]) -> None:
        self._share = share
        self._active = active
        self._window = time.monotonic()
        # Of this window and of the one before.
        self._begun = [0, 0]
        self._moved = [0, 0]

    def note_text(self) -> None:
        """A text begins."""
        self._turn()
        self._begun[0] += 1

    def take(self) -> bool:
        """Whether one more text may be moved; it is counted then."""
        self._turn()
        texts = max(sum(self._begun), self._active())
        if sum(self._moved) >= _FLOOR + self._share * texts:
            return False
        self._moved[0] += 1
        return True

    def _turn(self) -> None:
        age = time.monotonic() - self._window
        if age < _WINDOW_SECONDS:
            return
        old = age >= 2 * _WINDOW_SECONDS
        self._begun = [0, 0 if old else self._begun[0]]
        self._moved = [0, 0 if old else self._moved[0]]
        self._window = time.monotonic()

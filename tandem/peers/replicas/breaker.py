"""A circuit breaker: whether texts may go to a replica that has failed some."""

from __future__ import annotations

import math
import time

# One that fails again within so long of its last failure is tried later each time.
_AGAIN_SECONDS = 60.0
_FIRST_HOLD_SECONDS = 0.5
_LONGEST_HOLD_SECONDS = 30.0


class Breaker:
    """Opened by a text that failed, closed by a trial that was passed; never by another text.

    Attributes:
        is_open: whether texts are to go elsewhere.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._failed_at = -math.inf
        self._hold = 0.0

    def open(self) -> None:
        """A text has failed."""
        now = time.monotonic()
        again = now - self._failed_at < _AGAIN_SECONDS
        doubled = min(max(2 * self._hold, _FIRST_HOLD_SECONDS), _LONGEST_HOLD_SECONDS)
        self._hold = doubled if again else 0.0
        self._failed_at = now
        self.is_open = True

    @property
    def hold_seconds(self) -> float:
        """Until a trial makes sense: what passes trials and fails texts is tried ever later."""
        return max(self._failed_at + self._hold - time.monotonic(), 0.0) if self.is_open else 0.0

    def close(self) -> None:
        """A trial was passed."""
        self.is_open = False

    def forget(self) -> None:
        """Another process listens there, of which nothing is known."""
        self._failed_at, self._hold = -math.inf, 0.0

"""What became of drafts that were prepared while a target verified."""

from __future__ import annotations

from enum import StrEnum


class PreparedOutcome(StrEnum):
    """What had been prepared for the outcome that a round came to.

    HIT: its draft was ready.
    LATE: its draft had been begun.
    MISS: other drafts alone.
    """

    HIT = "hit"
    LATE = "late"
    MISS = "miss"

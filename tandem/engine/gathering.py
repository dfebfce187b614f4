"""Sequences between two jobs, and whether a pass should wait for them.

A pass takes about as long for several sequences as for one, and a sequence that misses it waits for
all of the next one. So those who are ready wait a moment for those who are likely to be back
soon. It pays more than once: sequences that shared a pass come back together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

S = TypeVar("S")

# No sequence is as punctual as its average.
_GRACE = 1.5
_GRACE_SECONDS = 0.001


@dataclass(slots=True)
class _Absence:
    """When a sequence left; None while it is here. How long it usually stays away, and
    whether a pass has waited for it since it left.
    """

    since: float | None = None
    usual: float | None = None
    waited_for: bool = False


class Gathering(Generic[S]):
    """Who is away, since when, and for how long as a rule. All times in seconds of one clock."""

    def __init__(self) -> None:
        self._of: dict[S, _Absence] = {}
        # Of the one that came last, for one that was never away.
        self._usual: float | None = None

    def leave(self, sequence: S, now: float) -> None:
        """Its job has ended; it will be back with another one."""
        absence = self._of.setdefault(sequence, _Absence(usual=self._usual))
        absence.since, absence.waited_for = now, False

    def come(self, sequence: S, now: float) -> None:
        """It has another job."""
        absence = self._of.get(sequence)
        if absence is None or absence.since is None:
            return
        away, absence.since = now - absence.since, None
        absence.usual = away if absence.usual is None else (absence.usual + away) / 2
        self._usual = absence.usual

    def drop(self, sequence: S) -> None:
        """It will not come back."""
        self._of.pop(sequence, None)

    def patience(self, now: float, until: float) -> float:
        """How much longer to wait, for those who should be back before `until`.

        A sequence that is overdue is not waited for.
        """
        latest = now
        for absence in self._of.values():
            if absence.since is None or absence.usual is None or absence.waited_for:
                continue
            overdue = absence.since + absence.usual * _GRACE + _GRACE_SECONDS
            if absence.since + absence.usual <= until:
                latest = max(latest, min(overdue, until))
        return latest - now

    def waited(self, until: float) -> None:
        """A pass has waited for those who should have been back before `until`.

        A sequence that is still away delays no other pass before it has come.
        """
        for absence in self._of.values():
            if absence.since is not None and absence.usual is not None:
                absence.waited_for |= absence.since + absence.usual <= until

"""How long a stage of a service may take: a multiple of what it has been taking."""

from __future__ import annotations

import time
from collections.abc import Callable

# A stage counts as hanging when it takes this many times as long as the longest recent one, which
# grows with the load.
_TIMES = 5.0
# A time counts as recent for one window at least, and for two at most.
_WINDOW_SECONDS = 30.0
# An opening's time grows with the prompt's length, plus what as many tokens as these take.
_BESIDE_TOKENS = 256


class Recent:
    """The longest of late; forgets in steps of a window, but never the last that is known."""

    def __init__(self) -> None:
        self._before = self._now = 0.0
        self._begun = time.monotonic()

    def note(self, value: float) -> None:
        """One more."""
        self._forget()
        self._now = max(self._now, value)

    @property
    def longest(self) -> float:
        """0 where nothing was ever noted."""
        self._forget()
        return max(self._before, self._now)

    def _forget(self) -> None:
        age = time.monotonic() - self._begun
        if age < _WINDOW_SECONDS:
            return
        self._before, self._now = self._now or self._before, 0.0
        self._begun = time.monotonic()


class Deadlines:
    """Of the openings and steps of one service, by what all its replicas have taken.

    Where nothing is known yet the bound is the operator's, and so where nothing is gained by
    giving up.

    Args:
        open_bound: of an opening, in seconds.
        step_bound: of a draft, or of a verdict.
        floor: no deadline is shorter, whatever was taken: a process may stand still for a moment.
    """

    def __init__(self, open_bound: float, step_bound: float, floor: float) -> None:
        self._open_bound = open_bound
        self._step_bound = step_bound
        self._floor = floor
        self._openings = Recent()
        self._steps = Recent()

    def of(self, patient: Callable[[], bool]) -> Waits:
        """Those of a sequence.

        Args:
            patient: whether no other could go on for it if it were given up.
        """
        return Waits(self, patient)

    def opening(self, tokens: int, patient: bool) -> float:
        """Seconds for a prompt of a length."""
        expected = self._openings.longest * (tokens + _BESIDE_TOKENS)
        return self._bounded(expected, self._open_bound, patient)

    def step(self, patient: bool) -> float:
        """Seconds for a step."""
        return self._bounded(self._steps.longest, self._step_bound, patient)

    def _bounded(self, expected: float, bound: float, patient: bool) -> float:
        if patient or not expected:
            return bound
        return min(max(_TIMES * expected, self._floor), bound)

    def note_opening(self, tokens: int, seconds: float) -> None:
        """What an opening took."""
        self._openings.note(seconds / (tokens + _BESIDE_TOKENS))

    def note_step(self, seconds: float) -> None:
        """What a step took."""
        self._steps.note(seconds)


class Waits:
    """The deadlines of one sequence; what it takes is noted where a wait ends well."""

    def __init__(self, deadlines: Deadlines, patient: Callable[[], bool]) -> None:
        self._deadlines = deadlines
        self._patient = patient
        self._begun = 0.0
        self._usual = True

    def opening(self, tokens: int, *, usual: bool = True) -> float:
        """Seconds for its opening, which begins.

        Args:
            tokens: of the prompt.
            usual: it takes as long as others; else as long as the operator allows.
        """
        self._begun, self._usual = time.monotonic(), usual
        return self._deadlines.opening(tokens, self._patient() or not usual)

    def opened(self, tokens: int) -> None:
        """It is open."""
        if self._usual:
            self._deadlines.note_opening(tokens, time.monotonic() - self._begun)

    def step(self) -> float:
        """Seconds for a step, which begins."""
        self._begun = time.monotonic()
        return self._deadlines.step(self._patient())

    def stepped(self) -> None:
        """It is done."""
        self._deadlines.note_step(time.monotonic() - self._begun)

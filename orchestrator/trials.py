"""When another size is tried, and for how long: a bounded share of the time may be lost on it."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.peers import DraftSize, Expected

# Rounds of each text in a trial: its first one still meets the others' rounds of before.
ROUNDS = 4
# What trials may cost, as a share of all time: the sizes that they find pay it back.
_SHARE = 0.015
# Nothing is known at the start, so that some trials come at once; after a long quiet time not all
# that was saved is spent, either.
_AT_START, _SAVED = 8, 64
# A trial ends when it took so many times as long as it should: texts may have ended, or wait.
_PATIENCE = 4
# So long is what was measured believed, in rounds of all texts that are made.
_STALE = 256


@dataclass(slots=True)
class Trial:
    """A size that every text is to try now.

    Attributes:
        size: to try.
        load: under which.
        left: rounds that are still to be seen.
        until_ns: it ends then in any case.
        goodput: of the best one, in tokens a nanosecond: what it is tried against.
    """

    size: DraftSize
    load: int
    left: int
    until_ns: int
    goodput: float


class Trials:
    """One at a time, for all texts together: what a size costs shows where all use it."""

    def __init__(self) -> None:
        self.current: Trial | None = None
        self._allowance: float | None = None
        self._rounds: dict[int, int] = {}
        self._tried: dict[tuple[int, DraftSize], int] = {}

    def earn(self, load: int, size: DraftSize, wall_ns: float) -> None:
        """A round of the chosen size has passed, which says again what it takes."""
        if self._allowance is None:
            self._allowance = _AT_START * wall_ns
        self._allowance = min(self._allowance + _SHARE * wall_ns, _SAVED * wall_ns)
        self._rounds[load] = self._rounds.get(load, 0) + 1
        self._tried[load, size] = self._rounds[load]

    def spend(self, lost_ns: float) -> None:
        """A round of a trial has passed, which took so much longer than its tokens are worth."""
        assert self.current is not None
        assert self._allowance is not None  # there was something to begin it with
        self.current.left -= 1
        self._allowance -= lost_ns

    def stale(self, load: int, size: DraftSize, texts: int) -> bool:
        """Whether a size has not been tried for long."""
        tried = self._tried.get((load, size))
        return tried is None or self._rounds.get(load, 0) - tried >= _STALE * texts

    def begin(
        self, size: DraftSize, load: int, texts: int, worth: float, best: Expected, now_ns: int
    ) -> bool:
        """Begin a trial where there is something left to lose.

        Args:
            size: to try.
            load: now.
            texts: that are being made.
            worth: its goodput over the best one's, as it is expected.
            best: of a round of the best size.
            now_ns: the time.

        Returns:
            Whether it was begun.
        """
        cost = ROUNDS * texts * best.wall_ns * max(1 - worth, 0.0)
        if self.current is not None or self._allowance is None or cost > self._allowance:
            return False
        self._tried[load, size] = self._rounds.get(load, 0)
        until = now_ns + int(_PATIENCE * ROUNDS * best.wall_ns)
        self.current = Trial(size, load, ROUNDS * texts, until, best.goodput)
        return True

    def running(self, load: int, now_ns: int) -> Trial | None:
        """The trial that goes on."""
        trial = self.current
        if trial is not None and (
            trial.left <= 0 or now_ns > trial.until_ns or abs(trial.load - load) > 1
        ):
            self.current = trial = None
        return trial

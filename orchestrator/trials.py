"""When another size is tried, and for how long: a bounded share of the time may be lost on it."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.peers import DraftSize, Expected

# Rounds of each text in a trial: its first one still meets the others' rounds of before.
ROUNDS = 4
# What a drafter is worth is seen by as few texts, and not more often than in so many rounds
# of each.
_SAMPLE, _SAMPLE_EVERY = 4, 64
# What trials may cost, as a share of all time: the sizes that they find pay it back.
_SHARE = 0.01
# Nothing is known at the start, so that some trials come at once; behind a long quiet time not
# everything that was saved is spent. In rounds of each text.
_AT_START, _SAVED = 8, 16
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
        places: for texts that have not joined it.
        measures: whether its times say what the size takes: all texts are in it.
    """

    size: DraftSize
    load: int
    left: int
    until_ns: int
    goodput: float
    places: int
    measures: bool

    def join(self) -> bool:
        """Take part in it, where there is a place."""
        self.places -= 1
        return self.places >= 0


class Trials:
    """One at a time, for all texts together: what a size costs shows where all use it."""

    def __init__(self) -> None:
        self.current: Trial | None = None
        # By load, in nanoseconds of a text's time.
        self._allowance: dict[int, float] = {}
        self._rounds: dict[int, int] = {}
        self._sampled: dict[int, int] = {}
        self._tried: dict[tuple[int, DraftSize], int] = {}

    def earn(self, load: int, size: DraftSize, texts: int, wall_ns: float) -> None:
        """A round of the chosen size has passed, which says again what it takes."""
        saved = self._allowance.get(load, _AT_START * texts * wall_ns) + _SHARE * wall_ns
        self._allowance[load] = min(saved, _SAVED * texts * wall_ns)
        self._rounds[load] = self._rounds.get(load, 0) + 1
        self._tried[load, size] = self._rounds[load]

    def spend(self, lost_ns: float) -> None:
        """A round of a trial has passed, which took so much longer than its tokens are worth."""
        assert self.current is not None
        self.current.left -= 1
        self._allowance[self.current.load] -= lost_ns

    def stale(self, load: int, size: DraftSize, texts: int) -> bool:
        """Whether a size has not been tried for long."""
        tried = self._tried.get((load, size))
        return tried is None or self._rounds.get(load, 0) - tried >= _STALE * texts

    def begin(
        self,
        size: DraftSize,
        load: int,
        texts: int,
        worth: float,
        best: Expected,
        now_ns: int,
        *,
        sample: bool = False,
    ) -> bool:
        """Begin a trial where there is something left to lose.

        Args:
            size: to try.
            load: now.
            texts: that are being made.
            worth: its goodput over the best one's, as it is expected.
            best: of a round of the best size.
            now_ns: the time.
            sample: whether some texts are enough, for what they see of the drafter.

        Returns:
            Whether it was begun.
        """
        joining = min(texts, _SAMPLE) if sample else texts
        cost = ROUNDS * joining * best.wall_ns * max(1 - worth, 0.0)
        if self.current is not None or cost > self._allowance.get(load, 0.0):
            return False
        passed = self._rounds.get(load, 0)
        if sample and passed - self._sampled.get(load, 0) < _SAMPLE_EVERY * texts:
            return False
        self._sampled[load] = passed
        self._tried[load, size] = passed
        until = now_ns + int(_PATIENCE * ROUNDS * best.wall_ns)
        self.current = Trial(
            size, load, ROUNDS * joining, until, best.goodput, joining, joining == texts
        )
        return True

    def running(self, load: int, now_ns: int) -> Trial | None:
        """The trial that goes on."""
        trial = self.current
        if trial is not None and (
            trial.left <= 0 or now_ns > trial.until_ns or abs(trial.load - load) > 1
        ):
            self.current = trial = None
        return trial

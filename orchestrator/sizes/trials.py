"""When another size is tried, and for how long: a bounded share of the time may be lost on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakSet

from orchestrator.sizes.goodput import PLAIN
from orchestrator.text.contracts import DraftSize, Expected

# Rounds of each text in a trial.
ROUNDS = 4
# What a drafter is worth is seen by as few texts, not more often than in so many rounds of each,
# and ever more seldom, up to so many, while it remains worth nothing.
_SAMPLE, _SAMPLE_EVERY, _SAMPLE_SELDOM = 2, 64, 512
# What trials may cost, as a share of all time: the sizes that they find pay it back.
_SHARE = 0.01
# Nothing is known at the start, so that some trials come at once; behind a long quiet time not
# everything that was saved is spent. In rounds of each text.
_AT_START, _SAVED = 8, 16
# What costs more than this is tried on credit, and paid back before the next trial; of what one of
# them cost beyond all expectation, as where all texts' drafters had to be opened, so much at most.
_CREDIT, _OWED = 0.5, 16
# Rounds of before may last so many times as long as expected, and slow those beside them.
_SETTLES = 2
# A trial times out after _PATIENCE times its expected duration, since texts may have ended or may
# wait; where drafters have to be opened first, _OPENING rounds of the best size later. It also ends
# when _MORE times as many texts are being made: its texts are no longer the whole load.
_PATIENCE, _OPENING, _MORE = 4, 64, 1.25
# A trial may have met a bad moment, so what it found ages, in rounds of each text: a size seen in
# few rounds is believed for _BELIEVED times as many, any other for _STALE. Plain decoding is tried
# again after _DUE at the latest, whatever trials have cost before.
_BELIEVED, _STALE, _DUE = 8, 128, 256


@dataclass(slots=True)
class Trial:
    """A size that every text is to try now.

    Attributes:
        size: to try.
        load: under which.
        left: rounds that are still to be seen.
        until_ns: it ends then in any case.
        best: of a round of the best size: what it is tried against.
        slots: for texts; one that ends makes room for another.
        measures: whether its times say what the size takes: all texts are in it.
        wall_ns: of its rounds, among which others go on behind it.
        members: texts that take part in it.
    """

    size: DraftSize
    load: int
    left: int
    until_ns: int
    best: Expected
    slots: int
    measures: bool
    wall_ns: int
    members: WeakSet[object] = field(default_factory=WeakSet)

    def join(self, text: object) -> bool:
        """Take part in it, where there is a slot."""
        if len(self.members) < self.slots:
            self.members.add(text)
        return text in self.members


class Trials:
    """One at a time, for all texts together: what a size costs shows where all use it.

    Attributes:
        current: the one that goes on, or the last one.
        settled_ns: rounds that began before this were beside rounds of another size.
    """

    def __init__(self) -> None:
        self.current: Trial | None = None
        self.settled_ns = 0
        # By load, in rounds.
        self._allowance: dict[int, float] = {}
        self._rounds: dict[int, int] = {}
        self._sampled: dict[int, int] = {}
        self._sample_every: dict[int, int] = {}
        self._tried: dict[tuple[int, DraftSize], int] = {}

    def earn(self, load: int, size: DraftSize, texts: int, rounds: int) -> None:
        """Rounds of the chosen size have passed, which say again what it takes."""
        saved = self._allowance.get(load, _AT_START * texts) + rounds * _SHARE
        self._allowance[load] = min(saved, _SAVED * texts)
        self._rounds[load] = self._rounds.get(load, 0) + rounds
        self._tried[load, size] = self._rounds[load]
        if size != PLAIN:
            self._sample_every[load] = _SAMPLE_EVERY

    def spend(self, trial: Trial, lost: float, texts: int) -> None:
        """A round has passed in a trial, or beside one.

        Args:
            trial: that it is owed to.
            lost: how much longer it took than its tokens are worth, in rounds of the best size.
            texts: that are being made.
        """
        left = self._allowance.get(trial.load, 0.0) - lost
        self._allowance[trial.load] = max(min(left, _SAVED * texts), -_OWED * texts)

    def stale(self, load: int, size: DraftSize, texts: int, seen: float) -> bool:
        """Whether a size has not been tried for long.

        Args:
            load: now.
            size: of a draft.
            texts: that are being made.
            seen: rounds of it, for each text.
        """
        passed = self._rounds.get(load, 0) - self._tried.get((load, size), 0)
        return passed >= min(_BELIEVED * seen, _STALE) * texts

    def begin(
        self,
        size: DraftSize,
        load: int,
        texts: int,
        expected: Expected,
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
            expected: of its rounds.
            best: of those of the best size.
            now_ns: the time.
            sample: whether some texts are enough, for what they see of the drafter.

        Returns:
            Whether it was begun.
        """
        joining = min(texts, _SAMPLE) if sample else texts
        lost = expected.wall_ns / best.wall_ns - expected.tokens / best.tokens
        cost = min(ROUNDS * joining * max(lost, 0.0), _CREDIT * texts)
        passed = self._rounds.get(load, 0)
        # Plain decoding is what nothing may be slower than: it does not wait for ever.
        due = size == PLAIN and passed - self._tried.get((load, size), 0) >= _DUE * texts
        if self.current is not None or (cost > self._allowance.get(load, 0.0) and not due):
            return False
        if sample:
            every = self._sample_every.get(load, _SAMPLE_EVERY)
            if passed - self._sampled.get(load, 0) < every * texts:
                return False
            self._sample_every[load] = min(2 * every, _SAMPLE_SELDOM)
        self._sampled[load] = passed
        self._tried[load, size] = passed
        until = now_ns + int(_PATIENCE * ROUNDS * max(best.wall_ns, expected.wall_ns))
        if size != PLAIN:
            until += int(_OPENING * best.wall_ns)
        if texts > 1:
            self.settled_ns = now_ns + int(_SETTLES * best.wall_ns)
        self.current = Trial(
            size,
            load,
            ROUNDS * joining,
            until,
            best,
            joining,
            joining == texts,
            int(expected.wall_ns) if texts > 1 else 0,
        )
        return True

    def running(self, load: int, texts: int, now_ns: int) -> Trial | None:
        """The trial that goes on."""
        trial = self.current
        if trial is None:
            return None
        crowded = trial.measures and texts > _MORE * trial.slots
        over = trial.left <= 0 or now_ns > trial.until_ns
        if over or crowded or abs(trial.load - load) > 1:
            self.settled_ns = now_ns + int(_SETTLES * trial.wall_ns)
            self.current = None
        return self.current


# Drafted rounds are little slower for a few plain ones beside them: one for so many.
_FEW = 4


class RoundMix:
    """The plain and the drafted rounds of all texts.

    A plain round beside drafted ones waits for their passes, so its time says nothing of plain
    decoding. If it were learnt from, plain decoding would seem slow, and every text would draft.

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

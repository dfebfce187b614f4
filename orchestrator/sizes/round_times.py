"""How long a round takes, by the size of its draft and by how many texts share the services."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.sizes.goodput import PLAIN
from orchestrator.text.contracts import DraftSize
from tandem.telemetry.stages import StageTimes

# Rounds are counted in rounds of each text: of 32 texts at once, as many weigh as much as one of a
# single text. A mean over so many follows a service that became slower within a second or two.
_LOOKS_BACK = 32
# A round that takes longer than this many times the mean met something else: a start, a compiler,
# a client's prompt.
_OUTLIER = 2.5
# What was seen more rounds ago than this weighs no more than so many new ones.
_LONG_AGO, _STALE = 64, 6
# What a row adds to a pass whose time nobody has measured with more or fewer rows.
_ROW = 0.02


@dataclass(slots=True)
class Mean:
    """A running mean that is not carried off by a single value."""

    value: float = 0.0
    count: float = 0.0

    def add(self, observed: float, weight: float = 1.0) -> None:
        """Take an observation in, of a weight in (0, 1]."""
        if self.count >= 3:
            observed = min(observed, _OUTLIER * self.value)
        self.count += weight
        self.value += (observed - self.value) * weight / min(self.count, _LOOKS_BACK)


@dataclass(slots=True)
class LoadTimes:
    """What was measured while so many texts were made.

    Attributes:
        walls: of rounds, by size, in nanoseconds.
        draft: a draft's passes, for each token of its depth.
        verify: the target's pass.
    """

    walls: dict[DraftSize, Mean] = field(default_factory=dict)
    draft: Mean = field(default_factory=Mean)
    verify: Mean = field(default_factory=Mean)
    _rounds: float = 0.0
    _last: dict[DraftSize, float] = field(default_factory=dict)

    def add(self, size: DraftSize, wall_ns: float, home: bool, weight: float) -> None:
        """Take a round's time in.

        Args:
            size: of its draft.
            wall_ns: that it took.
            weight: in rounds of each text.
            home: whether it was in no trial. Slow-downs that the size itself does not cause
                (another process, a hot chip) affect all sizes: when the mean of the size in use
                changes, the remembered means of the others are scaled with it.
        """
        mean = self.walls.setdefault(size, Mean())
        self._rounds += weight
        if self._rounds - self._last.get(size, 0) > _LONG_AGO:
            mean.count = min(mean.count, _STALE)
        self._last[size] = self._rounds
        before = mean.value
        mean.add(wall_ns, weight)
        if home and mean.count > _LOOKS_BACK:
            pace = mean.value / before
            for other in self.walls.values():
                if other is not mean:
                    other.value *= pace

    def wall(self, size: DraftSize) -> float:
        """A round's wall time in nanoseconds, measured or by the nearest size that was."""
        known = self.walls.get(size)
        if known is not None:
            return known.value
        near = min(self.walls, key=lambda other: _distance(size, other))
        rows = max(size.nodes, size.gamma) - max(near.nodes, near.gamma)
        passes = size.gamma - near.gamma
        beside = 0.0
        if PLAIN in (size, near):  # half of what is beside the passes is the drafter's message
            drafted = near if size == PLAIN else size
            model = self.verify.value + (near.gamma * self.draft.value)
            around = max(self.walls[near].value - model, 0.0)
            beside = -around / 2 if drafted is near else around
        wall = (
            self.walls[near].value
            + passes * self.draft.value
            + rows * _ROW * self.verify.value
            + beside
        )
        return max(wall, self.verify.value, 1.0)


class RoundTimes:
    """Learns from every round of every text that chooses its sizes."""

    def __init__(self) -> None:
        self._loads: dict[int, LoadTimes] = {}

    def at(self, load: int) -> LoadTimes | None:
        """What is known of a load, or of the nearest; None before the first round."""
        if load in self._loads:
            return self._loads[load]
        return self._loads[min(self._loads, key=lambda at: abs(at - load))] if self._loads else None

    def seen(self, load: int, size: DraftSize) -> float:
        """Rounds of each text that were seen with a size under a load."""
        at = self._loads.get(load)
        return at.walls[size].count if at is not None and size in at.walls else 0.0

    def add(
        self,
        load: int,
        size: DraftSize,
        wall_ns: int,
        draft: StageTimes | None,
        verify: StageTimes,
        *,
        home: bool = True,
        weight: float = 1.0,
    ) -> None:
        """Take a round in; see `LoadTimes.add`."""
        at = self._loads.get(load)
        if at is None:
            at = self._loads[load] = LoadTimes(draft=Mean(self._draft_near(load)))
        at.add(size, wall_ns, home, weight)
        at.verify.add(verify.forward_ns, weight)
        if draft is not None and size.gamma:
            at.draft.add(draft.forward_ns / size.gamma, weight)

    def _draft_near(self, load: int) -> float:
        """What a draft's pass takes under the nearest load under which there was one."""
        drafted = [at for at, known in self._loads.items() if known.draft.count]
        near = min(drafted, key=lambda at: abs(at - load), default=None)
        return 0.0 if near is None else self._loads[near].draft.value


def _distance(size: DraftSize, other: DraftSize) -> tuple[bool, int]:
    rows = abs(max(size.nodes, size.gamma) - max(other.nodes, other.gamma))
    return (size == PLAIN) != (other == PLAIN), abs(size.gamma - other.gamma) + rows

"""Whether drafters prepare drafts while the target verifies, and send them: what makes rounds fast.

What is prepared changes no text, but takes time of whatever computes it: where a drafter shares
processors with its target, rounds may be slower for it. To send what is prepared saves the way to
the drafter and back, and takes a network's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from orchestrator.sizes.goodput import WORTH_IT
from orchestrator.sizes.round_times import Mean, load_of
from orchestrator.text.contracts import (
    AheadWay,
    Decided,
    Drafted,
    DraftSize,
    SizeChoice,
    SizePolicy,
)

# Rounds of each text that show what a way is worth; one that lost is tried again for as many, and
# such trials take a share of the rounds.
_TRIAL, _SHARE = 16, 0.01


@dataclass(slots=True)
class _Ways:
    """Rounds of one size at one load, in each way.

    Attributes:
        walls: nanoseconds of a round, for each way that was tried.
        way: at present.
        left: rounds of it until it is time for another.
        trying: whether it is on trial.
    """

    way: AheadWay = AheadWay.NOTHING
    left: float = 0.0
    walls: dict[AheadWay, Mean] = field(default_factory=dict)
    trying: bool = True

    def turn(self, texts: int) -> None:
        """The present way has had its rounds: another is tried, or the best one is taken."""
        untried = [way for way in AheadWay if way not in self.walls]
        self.trying = bool(untried) or not self.trying
        if untried:
            self.way = untried[0]
        elif self.trying:  # the one that was tried longest ago
            self.way = next(way for way in self.walls if way is not self.way)
        else:
            self.way = AheadWay.NOTHING
            for way in AheadWay:  # the simplest, unless another is clearly faster
                if self.walls[way].value * WORTH_IT < self.walls[self.way].value:
                    self.way = way
        self.left = _TRIAL * texts if self.trying else _TRIAL / _SHARE * texts

    def learn(self, way: AheadWay, wall_ns: float, texts: int) -> None:
        """Learn what a round took."""
        mean = self.walls.pop(way, None) or Mean()
        mean.add_share(wall_ns, 1.0 / texts)
        self.walls[way] = mean  # the last one that was tried
        if way is self.way:
            self.left -= 1
            if self.left <= 0:
                self.turn(texts)


class AheadChoice:
    """What all texts of a pair learn together.

    Args:
        active: how many texts a target has.
        clock: in nanoseconds.
    """

    def __init__(
        self, active: Callable[[], int], clock: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self.clock = clock
        self._active = active
        self._ways: dict[tuple[DraftSize, int], _Ways] = {}

    def way(self, size: DraftSize) -> AheadWay:
        """How the next drafts of a size are prepared."""
        return self._of(size).way

    def learn(self, size: DraftSize, way: AheadWay, wall_ns: float) -> None:
        """Learn what a round took whose draft was asked for in a way, as the one before was."""
        self._of(size).learn(way, wall_ns, self._texts)

    @property
    def _texts(self) -> int:
        return max(self._active(), 1)

    def _of(self, size: DraftSize) -> _Ways:
        key = size, load_of(self._texts)
        if key not in self._ways:
            self._ways[key] = _Ways(left=_TRIAL * self._texts)
        return self._ways[key]


class PreparedSize:
    """A policy whose drafts may be prepared.

    Args:
        policy: chooses the sizes.
        everyone: what all texts learn.
    """

    def __init__(self, policy: SizePolicy, everyone: AheadChoice) -> None:
        self._policy, self._all = policy, everyone
        self._choice = SizeChoice(DraftSize(0))
        self._before: tuple[DraftSize, AheadWay] | None = None  # the round before
        self._began_ns = 0

    @property
    def begins_drafting(self) -> bool:
        """See `SizePolicy`."""
        return self._policy.begins_drafting

    def choose(self, left: int) -> SizeChoice:
        """See `SizePolicy`."""
        self._choice = choice = self._policy.choose(left)
        if choice.size.gamma:
            self._choice = replace(choice, ahead=self._all.way(choice.size))
        self._began_ns = self._all.clock()
        return self._choice

    def observe(self, drafted: Drafted | None, decided: Decided) -> None:
        """See `SizePolicy`."""
        self._policy.observe(drafted, decided)
        here = (self._choice.size, self._choice.ahead) if drafted is not None else None
        if here is not None and here == self._before:
            self._all.learn(*here, self._all.clock() - self._began_ns)
        self._before = here

    def end(self) -> None:
        """See `SizePolicy`."""
        self._policy.end()

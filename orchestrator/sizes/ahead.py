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
from tandem.peers.text.contracts import AheadWay, DraftReply, SizeChoice, SizePolicy, VerdictReply
from tandem.speculation.tree import DraftSize

# A trial of a way takes `_TRIAL` rounds of each text; trials of ways that lost before take `_SHARE`
# of all rounds.
_TRIAL, _SHARE = 16, 0.01


@dataclass(slots=True, eq=False)
class _Ways:
    """Rounds of one size at one load, in each way.

    Attributes:
        way: at present.
        left: rounds of it until it is time for another.
        walls: nanoseconds of a round, for each way that was tried, the last one last.
        trying: whether the present way is on trial.
    """

    way: AheadWay
    left: float
    walls: dict[AheadWay, Mean] = field(default_factory=dict)
    trying: bool = True

    def turn(self, texts: int) -> None:
        """The present way has had its rounds: another is tried, or the best one is taken."""
        untried = [way for way in AheadWay if way not in self.walls]
        self.trying = bool(untried) or not self.trying
        if untried:
            self.way = untried[0]
        elif self.trying:  # the one that was tried longest ago, of which little is believed now
            self.way = next(way for way in self.walls if way is not self.way)
            self.walls[self.way].count = 1.0
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
        self.walls[way] = mean
        if way is self.way:
            self.left -= 1
            if self.left <= 0:
                self.turn(texts)


class AheadChoice:
    """What all texts of a pair learn together.

    Args:
        active: how many texts a target has.
        only: the way of all rounds; None chooses.
        clock: in nanoseconds.
    """

    def __init__(
        self,
        active: Callable[[], int],
        only: AheadWay | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.only = only
        self.clock = clock
        self._active = active
        self._ways: dict[tuple[DraftSize, int], _Ways] = {}
        self._last: dict[int, _Ways] = {}  # of the size that was chosen last, by load

    @property
    def texts(self) -> int:
        """That a target has."""
        return max(self._active(), 1)

    def of(self, size: DraftSize) -> _Ways:
        """The ways of a size now. A new size begins with the way of the last one."""
        load = load_of(self.texts)
        found = self._ways.get((size, load))
        if found is None:
            before = self._last.get(load)
            way = AheadWay.NOTHING if before is None or before.trying else before.way
            found = self._ways[size, load] = _Ways(way, _TRIAL * self.texts)
        self._last[load] = found
        return found


class PreparedSize:
    """A policy whose drafts may be prepared.

    Args:
        policy: chooses the sizes.
        everyone: what all texts learn.
    """

    def __init__(self, policy: SizePolicy, everyone: AheadChoice) -> None:
        self._policy, self._all = policy, everyone
        self._ways: _Ways | None = None  # of this round, where it has a draft
        self._before: tuple[_Ways, AheadWay] | None = None  # of the round before, as it was drafted
        self._began_ns = 0

    @property
    def begins_drafting(self) -> bool:
        """See `SizePolicy`."""
        return self._policy.begins_drafting

    def choose(self, left: int) -> SizeChoice:
        """See `SizePolicy`."""
        choice = self._policy.choose(left)
        self._ways = None
        if choice.size.gamma and self._all.only is not None:
            return replace(choice, ahead=self._all.only)
        if choice.size.gamma:
            self._ways = self._all.of(choice.size)
            choice = replace(choice, ahead=self._ways.way)
        self._began_ns = self._all.clock()
        return choice

    def observe(self, drafted: DraftReply | None, decided: VerdictReply) -> None:
        """See `SizePolicy`."""
        self._policy.observe(drafted, decided)
        here = None
        # The target's own drafts are not prepared.
        if self._ways is not None and drafted is not None and drafted.asked is None:
            here = self._ways, drafted.ahead
            if self._before == here:
                wall_ns = self._all.clock() - self._began_ns
                self._ways.learn(drafted.ahead, wall_ns, self._all.texts)
        self._before = here

    def end(self) -> None:
        """See `SizePolicy`."""
        self._policy.end()

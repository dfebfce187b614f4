"""Whether drafters prepare drafts while the target verifies: as long as rounds are faster so.

What is prepared changes no text, but takes time of whatever computes it: where a drafter shares
processors with its target, rounds may be slower for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from orchestrator.sizes.goodput import WORTH_IT
from orchestrator.sizes.round_times import Mean, load_of
from orchestrator.text.contracts import Decided, Drafted, DraftSize, SizeChoice, SizePolicy

# Rounds of each text that show what a way is worth; a way that lost is tried again for as many,
# which takes a share of the rounds.
_TRIAL, _SHARE = 16, 0.01


@dataclass(slots=True)
class _Ways:
    """Rounds of one size at one load, without prepared drafts and with them.

    Attributes:
        walls: nanoseconds of a round, by whether drafts are prepared.
        prepares: the way at present.
        left: rounds until the other way is tried, or the trial ends.
        trying: whether the present way is on trial.
    """

    walls: tuple[Mean, Mean]
    prepares: bool = False
    left: float = _TRIAL
    trying: bool = True

    def turn(self, texts: int) -> None:
        """The present way has had its rounds."""
        plain, prepared = (mean.value if mean.count else None for mean in self.walls)
        if plain is None or prepared is None:  # the other way was never tried
            self.prepares, self.left, self.trying = not self.prepares, _TRIAL * texts, True
        elif self.trying:
            self.prepares = prepared * WORTH_IT < plain
            self.left, self.trying = _TRIAL / _SHARE * texts, False
        else:
            self.prepares, self.left, self.trying = not self.prepares, _TRIAL * texts, True


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

    def prepares(self, size: DraftSize) -> bool:
        """Whether the next drafts of a size are prepared."""
        return self._of(size).prepares

    def learn(self, size: DraftSize, prepared: bool, wall_ns: float) -> None:
        """Learn what a round took whose draft was asked for in a way, as the one before was."""
        ways, texts = self._of(size), max(self._active(), 1)
        ways.walls[prepared].add_share(wall_ns, 1.0 / texts)
        if prepared == ways.prepares:
            ways.left -= 1
            if ways.left <= 0:
                ways.turn(texts)

    def _of(self, size: DraftSize) -> _Ways:
        key = size, load_of(max(self._active(), 1))
        found = self._ways.get(key)
        if found is None:
            found = self._ways[key] = _Ways((Mean(), Mean()))
        return found


class PreparedSize:
    """A policy whose drafts may be prepared.

    Args:
        policy: chooses the sizes.
        everyone: what all texts learn.
    """

    def __init__(self, policy: SizePolicy, everyone: AheadChoice) -> None:
        self._policy, self._all = policy, everyone
        self._choice = SizeChoice(DraftSize(0))
        self._before: tuple[DraftSize, bool] | None = None  # the round before
        self._began_ns = 0

    @property
    def begins_drafting(self) -> bool:
        """See `SizePolicy`."""
        return self._policy.begins_drafting

    def choose(self, left: int) -> SizeChoice:
        """See `SizePolicy`."""
        choice = self._policy.choose(left)
        ahead = choice.size.gamma > 0 and self._all.prepares(choice.size)
        self._choice = replace(choice, ahead=ahead)
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

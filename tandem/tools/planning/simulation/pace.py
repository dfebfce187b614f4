"""How fast a target's texts progress, by their number: simulated round by round."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from tandem.tools.planning.measured.measurement import Measurement
from tandem.tools.planning.simulation.rounds import Fleet
from tandem.tools.planning.simulation.window import Window, WindowFigures

# Whole texts needed to tell how texts differ in pace; with fewer, a level takes the previous one's.
_TELLING_TEXTS = 16
# Most replicas of each kind that represent a fleet of their ratio.
_MOST_IN_CELL = 4


@dataclass(frozen=True)
class TargetPace:
    """A target that always has the same number of texts.

    Attributes:
        texts: on each target.
        pace: time per token of each text, relative to the mean.
        seen: figures of the window.
    """

    texts: int
    pace: NDArray[np.float64]
    seen: WindowFigures


class Pace:
    """Levels of a ratio of targets to drafters.

    Attributes:
        drafters_each: drafters for each target.
        gamma: draft length.
        slots: texts that a target holds.
        levels: by texts on a target, from 1 to `slots`.

    Args:
        measured: times and acceptance.
        drafters_each: drafters for each target, a ratio of small numbers; 0 with gamma 0.
        gamma: draft length.
        slots: texts that a target holds.
        gather: as the services' setting of that name.
        seed: of the runs.
    """

    def __init__(
        self,
        measured: Measurement,
        drafters_each: Fraction,
        gamma: int,
        slots: int,
        gather: float,
        seed: int,
    ) -> None:
        self.drafters_each, self.gamma, self.slots = drafters_each, gamma, slots
        targets, drafters = drafters_each.denominator, drafters_each.numerator
        fleet = Fleet(targets, drafters, gamma, slots, gather)
        self.levels: list[TargetPace] = []
        for texts in _up_to(slots):
            clients = texts * targets
            seen = Window(measured, fleet, clients, seed).look()
            if len(seen.tpot) >= max(_TELLING_TEXTS, clients):
                pace = seen.tpot / seen.tpot.mean()
            else:
                pace = self.levels[-1].pace if self.levels else np.ones(1)
            self.levels.append(TargetPace(texts, pace, seen))
        self._at = [float(level.texts) for level in self.levels]

    def tokens_per_s(self) -> list[float]:
        """Tokens a second of each text, by texts on its target: from 0 (as for 1) to `slots`."""
        known = [level.seen.tokens_per_s for level in self.levels]
        found = np.interp(range(self.slots + 1), self._at, known)
        return [float(speed) for speed in found]

    def busy(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Shares of the time that targets' and drafters' engines are in a pass, by texts on a
        target, from 0."""
        known = [(level.seen.target_busy, level.seen.drafter_busy) for level in self.levels]
        at, texts = [0.0, *self._at], range(self.slots + 1)
        target, drafter = ([0.0, *of] for of in zip(*known, strict=True))
        return np.interp(texts, at, target), np.interp(texts, at, drafter)

    def needed(self, tokens_per_s: float) -> int | None:
        """The fewest texts on a target that together reach this speed; None if none do."""
        speeds = self.tokens_per_s()
        return next((n for n in range(1, self.slots + 1) if n * speeds[n] >= tokens_per_s), None)

    def nearest(self, texts: int) -> TargetPace:
        """The lowest level with at least this many texts."""
        return next((lev for lev in self.levels if lev.texts >= texts), self.levels[-1])


def ratio_of(drafters_each: float) -> Fraction:
    """The smallest ratio of small numbers that is at least this one."""
    best = Fraction(math.ceil(drafters_each))
    for targets in range(1, _MOST_IN_CELL + 1):
        drafters = math.ceil(drafters_each * targets - 1e-9)
        if drafters:
            best = min(best, Fraction(drafters, targets)) if best else Fraction(drafters, targets)
    return best or Fraction(1, _MOST_IN_CELL)


def _up_to(slots: int) -> list[int]:
    """1, 2, 4 and so on, then `slots`."""
    doubled = [1 << power for power in range(slots.bit_length())]
    return sorted({*(texts for texts in doubled if texts < slots), slots})

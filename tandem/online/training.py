"""What a trainer does: it learns from the replay, measures, and offers weights that are better."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tandem.errors import EngineFailure
from tandem.online.kept_text import KeptText
from tandem.online.learner import MOST_HELD_OUT, TEXTS, Measured, WeightsInTraining
from tandem.online.replay import Replay, ReplayFile

# Texts to measure on, at least.
_FEWEST_HELD_OUT = 8
# Steps between two measurements, and measurements without a gain after which it begins again.
_MEASURE_EVERY, _PATIENCE = 25, 8
# What new weights must gain to be worth a change: more than chance, and this much of α.
_LEAST_GAIN, _ERRORS = 0.003, 2.0
# By how many nats tokens of home texts may be less likely than at first.
_MOST_AT_HOME = 0.05
# Files that are held in memory.
_FILES = 16

Tell = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class HeldOutComparison:
    """Trained weights beside those that are served, on texts that are held out.

    Attributes:
        served: mean overlap of the weights that are served with the target's rows.
        trained: of the trained ones.
        error: standard error of the difference.
        unsaid: log q − log p of the tokens that came, in nats, with the weights that are served (q)
            and the target's rows (p); not below 0 for rows that say nothing of these texts.
        home: −log q of the tokens of home texts, in nats, less that of the first weights.
        steps: of training.
    """

    served: float
    trained: float
    error: float
    unsaid: float
    home: float
    steps: int

    @property
    def fault(self) -> str:
        """Why the trained weights are not to be served; empty where they are."""
        if not self.unsaid < 0:
            return "the target's rows do not say what came"
        gain = self.trained - self.served
        if not gain >= max(_LEAST_GAIN, _ERRORS * self.error):
            return "nothing gained"
        if not self.home <= _MOST_AT_HOME:
            return "home texts are forgotten"
        return ""


def compared(served: Measured, trained: Measured, home: float, steps: int) -> HeldOutComparison:
    """Measurements of the same texts."""
    differences = trained.overlap - served.overlap
    return HeldOutComparison(
        float(served.overlap.mean()),
        float(trained.overlap.mean()),
        float(differences.std(ddof=1) / np.sqrt(len(differences))),
        float(served.unsaid.mean()),
        home,
        steps,
    )


class OnlineTraining:
    """Rounds of steps and a measurement, for ever.

    Args:
        learner: what is trained.
        replay: of the traffic.
        folder: for weights that are offered.
        tell: is called with each measurement, and with an offer; see `tandem.online.__main__`.
        rest: is called after each step.
        idle: is called where there is nothing to do.
        seed: of the batches.
    """

    def __init__(
        self,
        learner: WeightsInTraining,
        replay: Replay,
        folder: Path,
        tell: Tell,
        rest: Callable[[], None],
        idle: Callable[[], None],
        seed: int = 0,
    ) -> None:
        self._learner, self._replay, self._folder, self._tell = learner, replay, folder, tell
        self._rest, self._idle = rest, idle
        self._numbers = np.random.default_rng(seed)
        self._read = lru_cache(_FILES)(replay.read)
        self._known: dict[ReplayFile, npt.NDArray[np.float64]] = {}
        self._held_out: list[tuple[ReplayFile, int]] = []
        # Of the weights that are served, on these texts.
        # What is served, measured on held-out texts, of which so many could be read.
        self._served: tuple[tuple[Sequence[tuple[ReplayFile, int]], int], Measured] | None = None
        self._offers = self._without_gain = 0

    def go(self) -> None:
        """Until the process ends.

        Raises:
            OSError: weights cannot be written.
        """
        while True:
            self.round()

    def round(self) -> None:
        """Some steps, and a measurement; or, where there are too few texts, a rest."""
        self._look()
        learnable = sum(int((odds > 0).sum()) for odds in self._known.values())
        if learnable < TEXTS or len(self._held_out) < _FEWEST_HELD_OUT:
            self._idle()
            return
        for _ in range(_MEASURE_EVERY):
            texts = self._drawn()
            try:
                if texts:
                    self._learner.step(texts, self._numbers)
            except EngineFailure:
                self._tell({"problem": "a step was not finite: it begins again"})
                self._learner.begin_again()
            self._rest()
        self._measure()
        self._rest()

    def _look(self) -> None:
        """Find out which files are there; of each text how likely it is to be learnt from."""
        files = self._replay.files()
        for file in self._known.keys() - set(files):
            del self._known[file]
        for file in files:
            if file not in self._known:
                texts = self._read(file)
                # Rejected places first: they have more to say.
                self._known[file] = np.array(
                    [0 if each.held_out else 1 + each.rejected.sum() for each in texts], float
                )
        held = [(f, n) for f in files for n, odds in enumerate(self._known[f]) if not odds]
        self._held_out = held[-MOST_HELD_OUT:]

    def _drawn(self) -> list[KeptText]:
        files = list(self._known)
        sums = np.array([self._known[file].sum() for file in files])
        if not sums.sum():
            return []
        found = []
        for place in self._numbers.choice(len(files), size=TEXTS, p=sums / sums.sum()):
            odds = self._known[files[place]]
            number = int(self._numbers.choice(len(odds), p=odds / odds.sum()))
            texts = self._read(files[place])
            found += texts[number : number + 1]  # none where the file is gone by now
        return found

    def _measure(self) -> None:
        found = [self._read(file)[number : number + 1] for file, number in self._held_out]
        texts = [text for each in found for text in each]
        if len(texts) < _FEWEST_HELD_OUT:
            return
        served, trained = self._of_served(texts), self._learner.measured(texts)
        if len(served.overlap) < _FEWEST_HELD_OUT:
            return  # too few have a row after a kept state
        result = compared(served, trained, self._learner.at_home(), self._learner.steps)
        fault = result.fault
        told = {"measured": asdict(result), "fault": fault}
        if fault:
            self._without_gain += 1
            if self._without_gain >= _PATIENCE:
                self._without_gain = 0
                self._learner.begin_again()
        else:
            self._without_gain = 0
            self._offers += 1
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"offer-{os.getpid()}-{self._offers}.safetensors"
            self._learner.write(path)
            self._learner.serve()
            self._served = None
            told["offer"] = path.name
        self._tell(told)

    def _of_served(self, texts: Sequence[KeptText]) -> Measured:
        """A measurement that is made once for the same texts and weights."""
        if self._served is not None:
            of, found = self._served
            if of == (self._held_out, len(texts)):
                return found
        found = self._learner.measured(texts, served=True)
        self._served = (self._held_out, len(texts)), found
        return found

"""Simulates a closed loop in its steady state, for a limited number of steps."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tandem.tools.planning.measured.measurement import Measurement
from tandem.tools.planning.simulation.rounds import Fleet, OfferedLoad, Rounds, Text

# A window ends after this many texts of each client, and at least this many in total.
_TEXTS_EACH = 4
_FEWEST_TEXTS = 240
# However long texts are, a window ends after this many steps on targets; with many clients after a
# few steps of each, so that batches have settled.
_MOST_STEPS = 20_000
_STEPS_EACH = 8
# Share of a window that is skipped, until the engines know their sequences.
_WARM_UP = 0.25
_NO_TEXT_ENDS_IT = 1 << 62


@dataclass(frozen=True)
class WindowFigures:
    """The figures of a window.

    Attributes:
        tokens_per_s: mean speed of a text after its first token; 1 if no text has a second one.
        ttft: seconds, of each text that began.
        tpot: seconds, of each text of several tokens that began and ended.
        target_busy: share of the time that the targets' engines were in a pass.
        drafter_busy: share of the time that the drafters' engines were in a pass.
    """

    tokens_per_s: float
    ttft: NDArray[np.float64]
    tpot: NDArray[np.float64]
    target_busy: float
    drafter_busy: float


class Window(Rounds):
    """Clients that ask again as soon as they are answered; most start in the middle of a text.

    Args:
        measured: times and acceptance.
        fleet: that serves.
        clients: at most as many as the fleet has slots.
        seed: of all random draws.
    """

    def __init__(self, measured: Measurement, fleet: Fleet, clients: int, seed: int) -> None:
        super().__init__(measured, fleet, OfferedLoad(_NO_TEXT_ENDS_IT, clients=clients, seed=seed))
        self._most_steps = max(_MOST_STEPS, _STEPS_EACH * clients)
        self._most_texts = max(_TEXTS_EACH * clients, _FEWEST_TEXTS) + clients
        self._resumed: set[int] = set()
        self._now = 0.0

    def look(self) -> WindowFigures:
        """Run the window."""
        self._begin_amid_texts()
        begin = self._run_until(_WARM_UP)
        left = {number: text.left for number, text in self.under_way.items()}
        before = len(self.ended)
        end = self._run_until(1.0)
        speed = self._speed(left, self.ended[before:], begin, end)
        busy = [
            sum(engine.busy_s for engine in engines) / (end * len(engines) or 1.0)
            for engines in (self.targets, self.drafters)
        ]
        whole = [(text.ended - text.first, text.shape.new_tokens - 1) for text in self._whole()]
        tpot = [spent / tokens for spent, tokens in whole if spent > 0 and tokens]
        return WindowFigures(speed, self._first_tokens(), np.array(tpot), *busy)

    def _speed(
        self, left: dict[int, int], ended: Sequence[Text], begin: float, end: float
    ) -> float:
        """Tokens a second of a text, from the tokens left to each text at the start and the end."""
        spent, tokens = 0.0, 0
        for text in (*ended, *self.under_way.values()):
            later = text.shape.new_tokens - 1
            if text.left > later:  # it has no token yet
                continue
            until = end if text.number in self.under_way else text.ended
            spent += until - min(max(text.first, begin), until)
            tokens += min(left.get(text.number, later), later) - max(text.left, 0)
        return tokens / spent if tokens and spent else 1.0

    def _begin_amid_texts(self) -> None:
        """Start all clients at once, as texts that share passes stay in step.

        The first client starts a new text, most others start in the middle of one.
        """
        self._arrive(0.0)
        each = self.measured.tokens_a_round(self.fleet.gamma)
        shapes = self.measured.texts
        steps = [shape.target_passes + (shape.new_tokens - 1) / each for shape in shapes]
        chosen = self.random.choices(range(len(shapes)), steps, k=self.load.clients - 1)
        for number in chosen:
            shape = shapes[number]
            if self.random.random() * steps[number] <= shape.target_passes:
                self._arrive(0.0)
                continue
            text = self.begin(shape, 0.0)
            self._resumed.add(text.number)
            self.place(text, 0.0)
            text.resume(0.0, self.random.randrange(1, shape.new_tokens))

    def _run_until(self, share: float) -> float:
        """Run up to a share of the window's steps or texts; return the time."""
        events, ended, pop = self.events, self.ended, heapq.heappop
        steps, texts = share * self._most_steps, share * self._most_texts
        while self.steps < steps and len(ended) < texts:
            self._now, _, then = pop(events)
            then(self._now)
        return self._now

    def _whole(self) -> list[Text]:
        """Texts that began and ended in the window."""
        return [text for text in self.ended if text.number not in self._resumed]

    def _first_tokens(self) -> NDArray[np.float64]:
        """Times to the first token of all texts that have arrived so far.

        Runs until each has its first token, for at most as many steps again. If a target is
        overloaded, the time of a text that still has none counts up to then.
        """
        texts = self._whole()
        late = [text for text in self.under_way.values() if text.number not in self._resumed]
        texts += late
        most, now = 2 * self.steps, 0.0
        while late and self.steps < most:
            if late[-1].left < late[-1].shape.new_tokens:
                late.pop()
            else:
                now, _, then = heapq.heappop(self.events)
                then(now)
        for text in late:
            if text.left == text.shape.new_tokens:
                text.first = now
        return np.array([text.first - text.arrived for text in texts])

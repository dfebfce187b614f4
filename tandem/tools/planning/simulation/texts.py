"""Simulates texts on a fleet of thousands of replicas, text by text.

All texts of a target progress at a pace that depends only on their number (`Pace`), so it changes
only when a text comes or goes. A text is thus a handful of events, however many rounds it has.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from itertools import count

import numpy as np

from tandem.tools.planning.measured.measurement import Measurement
from tandem.tools.planning.simulation.pace import Pace
from tandem.tools.planning.simulation.rounds import LeastLoaded
from tandem.tools.planning.simulation.served import RunFigures, steady

_ARRIVE, _BEGIN, _END = 0, 1, 2


class _Target:
    """A replica whose texts share its pace.

    Attributes:
        active: texts that hold a slot.
        writing: texts past their first token: the value of `done` at which each ends, and which.
        done: tokens that a text would have got if it had been there from the beginning.
        since: the time at which `done` was computed.
        version: of the next end; an event with another version is outdated.
    """

    __slots__ = ("active", "done", "since", "version", "writing")

    def __init__(self) -> None:
        self.active = 0
        self.writing: list[tuple[float, int]] = []
        self.done = self.since = 0.0
        self.version = 0


class SimulatedTexts:
    """One run.

    Args:
        measured: for the lengths of texts.
        pace: of targets with their drafters.
        targets: replicas.
        rate: texts a second, at random moments (a Poisson process).
        texts: total number.
        seed: of all random draws.
    """

    def __init__(
        self,
        measured: Measurement,
        pace: Pace,
        targets: int,
        rate: float,
        texts: int,
        seed: int,
    ) -> None:
        self._pace, self._rate, self._count = pace, rate, texts
        self._speeds = pace.tokens_per_s()
        self._levels = [pace.nearest(number) for number in range(pace.slots + 1)]
        self._targets = [_Target() for _ in range(targets)]
        self._least = LeastLoaded(self._targets)
        self._random = random.Random(seed)
        self._events: list[tuple[float, int, int, int, int]] = []
        self._order = count()
        self._waiting: deque[int] = deque()
        shapes = self._random.choices(measured.texts, k=texts)
        self._new_tokens = [shape.new_tokens for shape in shapes]
        self._arrived = [0.0] * texts
        self._first = [0.0] * texts
        self._ended = [0.0] * texts
        self._on = [0] * texts
        # Seconds that targets spent with each number of texts.
        self._spent = [0.0] * (pace.slots + 1)

    def run(self) -> RunFigures:
        """Run until all texts have ended."""
        at = 0.0
        for text in range(self._count):
            at += self._random.expovariate(self._rate)
            self._arrived[text] = at
        if self._count:
            self._push(self._arrived[0], _ARRIVE, 0, 0)
        now = 0.0
        while self._events:
            now, _, kind, number, version = heapq.heappop(self._events)
            if kind == _ARRIVE:
                self._arrive(now, number)
            elif kind == _BEGIN:
                self._begin(now, number)
            else:
                self._end(now, number, version)
        return self._served(now)

    def _push(self, at: float, kind: int, number: int, version: int) -> None:
        heapq.heappush(self._events, (at, next(self._order), kind, number, version))

    def _arrive(self, now: float, text: int) -> None:
        if text + 1 < self._count:
            self._push(self._arrived[text + 1], _ARRIVE, text + 1, 0)
        if not self._place(now, text):
            self._waiting.append(text)

    def _place(self, now: float, text: int) -> bool:
        """Give a text a slot; False if none is free."""
        number = self._least.take(self._pace.slots)
        if number is None:
            return False
        self._on[text] = number
        target = self._targets[number]
        self._advance(now, target, target.active - 1)
        self._schedule(now, number)
        opening = self._random.choice(self._levels[target.active].seen.ttft)
        self._push(now + opening, _BEGIN, text, 0)
        return True

    def _begin(self, now: float, text: int) -> None:
        """A text's first token has come."""
        number = self._on[text]
        target = self._targets[number]
        self._first[text] = now
        self._advance(now, target, target.active)
        luck = self._random.choice(self._levels[target.active].pace)
        work = max(self._new_tokens[text] - 1, 0) * luck
        heapq.heappush(target.writing, (target.done + work, text))
        self._schedule(now, number)

    def _advance(self, now: float, target: _Target, texts: int) -> None:
        """Bring a target up to now; until now it had this many texts."""
        self._spent[texts] += now - target.since
        target.done += (now - target.since) * self._speeds[texts]
        target.since = now

    def _schedule(self, now: float, number: int) -> None:
        """Schedule the end of a target's next text, valid if no text comes or goes before."""
        target = self._targets[number]
        target.version += 1
        if target.writing:
            left = max(target.writing[0][0] - target.done, 0.0)
            self._push(now + left / self._speeds[target.active], _END, number, target.version)

    def _end(self, now: float, number: int, version: int) -> None:
        target = self._targets[number]
        if version != target.version:
            return
        self._advance(now, target, target.active)
        text = heapq.heappop(target.writing)[1]
        self._ended[text] = now
        self._least.give_back(number)
        self._schedule(now, number)
        if self._waiting and self._place(now, self._waiting[0]):
            self._waiting.popleft()

    def _served(self, now: float) -> RunFigures:
        arrived, first, ended = (
            np.array(times) for times in (self._arrived, self._first, self._ended)
        )
        tokens = np.array(self._new_tokens)
        shares = np.array(self._spent) / (now * len(self._targets) or 1.0)
        held = shares @ np.arange(len(shares)) / self._pace.slots
        busy = [float(shares @ of) for of in self._pace.busy()]
        return steady(arrived, first, ended, tokens, float(held), *busy)

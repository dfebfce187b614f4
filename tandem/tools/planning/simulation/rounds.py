"""Texts through the queues of some replicas, round by round."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import numpy as np

from tandem.tools.planning.measured.measurement import MeasuredText, Measurement
from tandem.tools.planning.simulation.engine import SimulatedEngine, Times
from tandem.tools.planning.simulation.served import RunFigures, steady


class Counted(Protocol):
    """A replica."""

    active: int


class LeastLoaded:
    """Hands texts to the replica that has the fewest.

    Args:
        replicas: their `active` is counted here.
    """

    def __init__(self, replicas: Sequence[Counted]) -> None:
        self._replicas = replicas
        self._heap = [(0, number) for number in range(len(replicas))]

    def take(self, most: int) -> int | None:
        """One more text on it: its number; None where all have `most`."""
        heap, replicas = self._heap, self._replicas
        while heap[0][0] != replicas[heap[0][1]].active:  # said before its load changed
            heapq.heappop(heap)
        active, number = heap[0]
        if active >= most:
            return None
        replicas[number].active += 1
        heapq.heapreplace(heap, (active + 1, number))
        return number

    def give_back(self, number: int) -> None:
        """One text less."""
        self._replicas[number].active -= 1
        heapq.heappush(self._heap, (self._replicas[number].active, number))


_Then = Callable[[float], None]


@dataclass(frozen=True)
class Fleet:
    """What serves.

    Attributes:
        targets: replicas.
        drafters: replicas; 0 with gamma 0.
        gamma: draft length.
        slots: sequences that a replica holds.
        gather: as the services' setting of that name.
    """

    targets: int
    drafters: int
    gamma: int
    slots: int = 64
    gather: float = 1.0


@dataclass(frozen=True)
class OfferedLoad:
    """What is asked for: an open loop or, with `clients`, a closed one.

    Attributes:
        texts: in all.
        rate: texts a second, at random moments (a Poisson process).
        clients: that ask again as soon as they have their text.
        seed: of everything random.
    """

    texts: int
    rate: float = 0.0
    clients: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Simulated(RunFigures):
    """What came of it, batches too.

    Attributes:
        target_batch: sequences in a target's step, on average.
    """

    target_batch: float


class Rounds:
    """One run.

    Attributes:
        steps: passes of texts that targets have done: of prompts, and verifications.
        under_way: texts that have come and not ended, by their numbers.
        ended: the others.

    Args:
        measured: times and acceptance.
        fleet: that serves.
        load: that is asked for.
    """

    def __init__(self, measured: Measurement, fleet: Fleet, load: OfferedLoad) -> None:
        self.measured, self.fleet, self.load = measured, fleet, load
        self.events: list[tuple[float, int, _Then]] = []
        self._order = count()
        self.random = random.Random(load.seed)
        self.alone_s, self.drafted_alone_s = measured.verify.at(1), measured.draft.at(1)
        verify = Times(measured.verify, fleet.slots)
        # Drafters have no places of their own here: all texts that targets hold are spread on them.
        most = fleet.slots * fleet.targets // max(fleet.drafters, 1) + 1
        draft = Times(measured.draft, most if fleet.drafters else 1)
        self.targets = [
            SimulatedEngine(verify, fleet.gather, self.at) for _ in range(fleet.targets)
        ]
        self.drafters = [
            SimulatedEngine(draft, fleet.gather, self.at) for _ in range(fleet.drafters)
        ]
        self._least_target, self._least_drafter = (
            LeastLoaded(self.targets),
            LeastLoaded(self.drafters),
        )
        self._shares = [float(share) for share in measured.shares[: fleet.gamma]]
        self._waiting: deque[Text] = deque()
        self._begun = 0
        self.steps = 0
        self.held_s = 0.0
        self.under_way: dict[int, Text] = {}
        self.ended: list[Text] = []

    def at(self, moment: float, then: _Then) -> None:
        """Call something at a moment."""
        heapq.heappush(self.events, (moment, next(self._order), then))

    def run(self) -> Simulated:
        """Until all texts have ended."""
        if self.load.clients:
            for _ in range(min(self.load.clients, self.load.texts)):
                self._arrive(0.0)
        else:
            self._next_arrival(0.0)
        events, pop = self.events, heapq.heappop
        now = 0.0
        while events:
            now, _, then = pop(events)
            then(now)
        return self._result(now)

    def _next_arrival(self, now: float) -> None:
        if self._begun < self.load.texts:
            self.at(now + self.random.expovariate(self.load.rate), self._arrive_by_rate)

    def _arrive_by_rate(self, now: float) -> None:
        self._arrive(now)
        self._next_arrival(now)

    def _arrive(self, now: float) -> None:
        text = self.begin(self.random.choice(self.measured.texts), now)
        if self.place(text, now):
            self.at(now + self.measured.opening_s / 2, text.open)
        else:
            self._waiting.append(text)

    def begin(self, shape: MeasuredText, now: float) -> Text:
        """A text that nobody serves yet."""
        number, self._begun = self._begun, self._begun + 1
        text = self.under_way[number] = Text(self, number, shape, now)
        return text

    def place(self, text: Text, now: float) -> bool:
        """Give a text a target and a drafter, where there is a place."""
        target = self._least_target.take(self.fleet.slots)
        if target is None:
            return False
        text.target = target
        if self.drafters:
            text.drafter = self._least_drafter.take(1 << 62) or 0
        text.placed = now
        return True

    def leave(self, text: Text, now: float) -> None:
        """A text has ended."""
        self.ended.append(text)
        del self.under_way[text.number]
        self.held_s += now - text.placed
        self.targets[text.target].drop(text.number)
        self._least_target.give_back(text.target)
        if self.drafters:
            self.drafters[text.drafter].drop(text.number)
            self._least_drafter.give_back(text.drafter)
        if self._waiting and self.place(self._waiting[0], now):
            self.at(now + self.measured.opening_s / 2, self._waiting.popleft().open)
        if self.load.clients and self._begun < self.load.texts:
            self._arrive(now)

    def accepted(self) -> int:
        """Of a draft, by chance."""
        draw = self.random.random()
        kept = 0
        for share in self._shares:
            if draw >= share:
                break
            kept += 1
        return kept

    def _result(self, now: float) -> Simulated:
        texts = self.ended
        served = steady(
            np.array([text.arrived for text in texts]),
            np.array([text.first for text in texts]),
            np.array([text.ended for text in texts]),
            np.array([text.shape.new_tokens for text in texts]),
            self.held_s / (now * len(self.targets) * self.fleet.slots or 1.0),
            sum(e.busy_s for e in self.targets) / (now * len(self.targets) or 1.0),
            sum(e.busy_s for e in self.drafters) / (now * len(self.drafters) or 1.0),
        )
        return Simulated(
            **vars(served),
            target_batch=sum(e.served for e in self.targets)
            / max(sum(e.passes for e in self.targets), 1),
        )


class Text:
    """One text on its way."""

    __slots__ = (
        *("_gamma", "_simulation", "arrived", "drafter", "ended", "first", "left"),
        *("number", "placed", "shape", "target"),
    )

    def __init__(self, simulation: Rounds, number: int, shape: MeasuredText, now: float) -> None:
        self._simulation = simulation
        self.number, self.shape, self.arrived = number, shape, now
        self.target = self.drafter = 0
        self.placed = self.first = self.ended = now
        self.left = shape.new_tokens
        self._gamma = simulation.fleet.gamma

    def open(self, now: float) -> None:
        """Its prompt has come to the target."""
        simulation, shape = self._simulation, self.shape
        # In a pass that is computed anyway a prompt costs what it takes beyond.
        extra = max(shape.target_prefill_s / shape.target_passes - simulation.alone_s, 0.0)
        target = simulation.targets[self.target]
        target.ask(now, self.number, self._opened, shape.target_passes, extra)

    def resume(self, now: float, left: int) -> None:
        """It is in its midst already, with so many tokens to come."""
        self.left = left
        self._go_on(now)

    def _opened(self, now: float) -> None:
        self._simulation.steps += self.shape.target_passes
        self.first = now + self._simulation.measured.opening_s / 2
        self.left -= 1
        self._go_on(now + self._simulation.measured.opening_s / 2)

    def _go_on(self, now: float) -> None:
        if self.left <= 0:
            self._simulation.at(now, self._end)
        elif self._gamma:
            self._simulation.at(now, self._draft)
        else:
            self._simulation.at(now, self._verify)

    def _end(self, now: float) -> None:
        self.ended = now
        self._simulation.leave(self, now)

    def _draft(self, now: float) -> None:
        simulation, shape = self._simulation, self.shape
        extra = 0.0
        if self.left == shape.new_tokens - 1:
            # The first draft waits for the drafter to take in the prompt.
            prompt = max(shape.drafter_prefill_s - simulation.drafted_alone_s, 0.0)
            extra = prompt / self._gamma
        drafter = simulation.drafters[self.drafter]
        drafter.ask(now, self.number, self._drafted, self._gamma, extra)

    def _drafted(self, now: float) -> None:
        self._simulation.at(now + self._simulation.measured.round_s / 2, self._verify)

    def _verify(self, now: float) -> None:
        self._simulation.targets[self.target].ask(now, self.number, self._verified)

    def _verified(self, now: float) -> None:
        self._simulation.steps += 1
        self.left -= 1 + (self._simulation.accepted() if self._gamma else 0)
        self._go_on(now + self._simulation.measured.round_s / 2)

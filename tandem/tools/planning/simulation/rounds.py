"""Simulates texts on some replicas and their queues, round by round."""

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


class CountedReplica(Protocol):
    """A replica whose active texts are counted."""

    active: int


class LeastLoaded:
    """Gives texts to the replica with the fewest.

    Args:
        replicas: this class counts their `active` texts.
    """

    def __init__(self, replicas: Sequence[CountedReplica]) -> None:
        self._replicas = replicas
        self._heap = [(0, number) for number in range(len(replicas))]

    def take(self, most: int) -> int | None:
        """Add a text to the least loaded replica; its number, or None if all have `most`."""
        heap, replicas = self._heap, self._replicas
        while heap[0][0] != replicas[heap[0][1]].active:  # an outdated entry
            heapq.heappop(heap)
        active, number = heap[0]
        if active >= most:
            return None
        replicas[number].active += 1
        heapq.heapreplace(heap, (active + 1, number))
        return number

    def give_back(self, number: int) -> None:
        """Remove a text from a replica."""
        self._replicas[number].active -= 1
        heapq.heappush(self._heap, (self._replicas[number].active, number))


_Then = Callable[[float], None]


@dataclass(frozen=True)
class Fleet:
    """The replicas that serve.

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
    """The offered load: an open loop or, with `clients`, a closed one.

    Attributes:
        texts: total number.
        rate: texts a second, at random moments (a Poisson process).
        clients: each asks again as soon as it has its text.
        seed: of all random draws.
    """

    texts: int
    rate: float = 0.0
    clients: int = 0
    seed: int = 0


@dataclass(frozen=True)
class SimulatedFigures(RunFigures):
    """Figures of a run, with batch sizes.

    Attributes:
        target_batch: mean sequences in a target's pass.
    """

    target_batch: float


class Rounds:
    """One run.

    Attributes:
        steps: steps of texts on targets so far: passes over prompts, and verifications.
        under_way: texts that have arrived and not ended, by their numbers.
        ended: texts that have ended.

    Args:
        measured: times and acceptance.
        fleet: that serves.
        load: the offered load.
    """

    def __init__(self, measured: Measurement, fleet: Fleet, load: OfferedLoad) -> None:
        self.measured, self.fleet, self.load = measured, fleet, load
        self.events: list[tuple[float, int, _Then]] = []
        self._order = count()
        self.random = random.Random(load.seed)
        self.alone_s, self.drafted_alone_s = measured.verify.at(1), measured.draft.at(1)
        verify = Times(measured.verify, fleet.slots)
        # Drafters have no slots of their own here: all texts on targets are spread over them.
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
        """Schedule a call at a time."""
        heapq.heappush(self.events, (moment, next(self._order), then))

    def run(self) -> SimulatedFigures:
        """Run until all texts have ended."""
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
        """A new text, not yet placed on a replica."""
        number, self._begun = self._begun, self._begun + 1
        text = self.under_way[number] = Text(self, number, shape, now)
        return text

    def place(self, text: Text, now: float) -> bool:
        """Give a text a target and a drafter; False if no target has a free slot."""
        target = self._least_target.take(self.fleet.slots)
        if target is None:
            return False
        text.target = target
        if self.drafters:
            text.drafter = self._least_drafter.take(1 << 62) or 0
        text.placed = now
        return True

    def leave(self, text: Text, now: float) -> None:
        """End a text; its slot goes to a waiting one, and a client's next text arrives."""
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
        """Draw how many tokens of a draft are accepted."""
        draw = self.random.random()
        kept = 0
        for share in self._shares:
            if draw >= share:
                break
            kept += 1
        return kept

    def _result(self, now: float) -> SimulatedFigures:
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
        return SimulatedFigures(
            **vars(served),
            target_batch=sum(e.served for e in self.targets)
            / max(sum(e.passes for e in self.targets), 1),
        )


class Text:
    """One text in the simulation."""

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
        """Its prompt has arrived at the target."""
        simulation, shape = self._simulation, self.shape
        # A prompt adds only the time beyond that of a pass of one sequence.
        extra = max(shape.target_prefill_s / shape.target_passes - simulation.alone_s, 0.0)
        target = simulation.targets[self.target]
        target.ask(now, self.number, self._opened, shape.target_passes, extra)

    def resume(self, now: float, left: int) -> None:
        """Continue in the middle of the text, with `left` tokens to come."""
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

"""A replica's engine, simulated: it serves all who wait in one pass, and others wait meanwhile."""

from __future__ import annotations

from collections.abc import Callable

from tandem.traces.costs import Curve

# As tandem/engine/gathering.py has it: nobody is as punctual as his average.
_GRACE = 1.5
_GRACE_SECONDS = 0.001


class Times:
    """Lengths of an engine's step by its batch, computed once each.

    Args:
        curve: of a pass.
        passes: in a step.
        most: sequences in a batch.
    """

    def __init__(self, curve: Curve, passes: int, most: int) -> None:
        self.of = [0.0, *(passes * curve.at(size) for size in range(1, most + 1))]


class Engine:
    """One engine.

    A step takes what its batch takes, and the prompts in it what they take beyond. Like the
    engine itself it waits up to the length of the last step for sequences that should be back
    by then, and for each of them once.

    Attributes:
        active: texts that hold a place.
        busy_s: in steps, in all.
        steps: how many.
        served: sequences in those steps, in all.

    Args:
        times: of its steps.
        gather: share of the last step that it waits at most.
        at: calls a function at a moment.
    """

    __slots__ = (
        *("_absent", "_at", "_awaited", "_batch", "_gather", "_last", "_times", "_usual"),
        *("_waiting", "_wake", "active", "busy_s", "running", "served", "steps"),
    )

    def __init__(
        self, times: Times, gather: float, at: Callable[[float, Callable[[float], None]], None]
    ) -> None:
        self.active = 0
        self.busy_s = 0.0
        self.steps = self.served = 0
        self.running = False
        self._times = times
        self._gather = gather
        self._at = at
        self._last = 0.0
        self._waiting: list[tuple[int, float, Callable[[float], None]]] = []
        self._batch: list[tuple[int, float, Callable[[float], None]]] = []
        # Who left when, for how long as a rule, and whom a step now waits for.
        self._absent: dict[int, float] = {}
        self._usual: dict[int, float] = {}
        self._awaited: set[int] = set()
        self._wake = 0

    def ask(self, now: float, text: int, extra_s: float, done: Callable[[float], None]) -> None:
        """A text has a step to be done.

        Args:
            now: the moment.
            text: whose.
            extra_s: that it takes beyond a sequence's share: a prompt's.
            done: called at its end.
        """
        left = self._absent.pop(text, None)
        if left is not None:
            away = now - left
            before = self._usual.get(text)
            self._usual[text] = away if before is None else (away + before) / 2
            self._awaited.discard(text)
        self._waiting.append((text, extra_s, done))
        if not self.running:
            if self._awaited:
                return
            self._wake += 1
            self._start(now)

    def drop(self, text: int) -> None:
        """A text is over."""
        self._absent.pop(text, None)
        self._usual.pop(text, None)
        self._awaited.discard(text)

    def _start(self, now: float) -> None:
        self._batch, self._waiting = self._waiting, []
        self._awaited.clear()
        self.running = True
        extra = sum(job[1] for job in self._batch)
        size = min(len(self._batch), len(self._times.of) - 1)
        self._last = self._times.of[size] + extra
        self.busy_s += self._last
        self.steps += 1
        self.served += len(self._batch)
        self._at(now + self._last, self._end)

    def _end(self, now: float) -> None:
        self.running = False
        ended, self._batch = self._batch, []
        for text, _, done in ended:
            self._absent[text] = now
            done(now)
        if self._waiting and not self.running:
            self._wait_or_start(now)

    def _wait_or_start(self, now: float) -> None:
        """Wait for those who should be back soon, or begin."""
        until = now + self._gather * self._last
        latest = now
        for text, left in self._absent.items():
            usual = self._usual.get(text)
            if usual is not None and left + usual <= until:
                overdue = left + usual * _GRACE + _GRACE_SECONDS
                if overdue > now:
                    latest = max(latest, min(overdue, until))
                    self._awaited.add(text)
        if not self._awaited:
            self._start(now)
            return
        self._wake += 1
        wake = self._wake

        def give_up(moment: float) -> None:
            if self._wake == wake and not self.running and self._waiting:
                for text in self._awaited:  # who is late delays no other step
                    self._usual.pop(text, None)
                self._start(moment)

        self._at(latest, give_up)

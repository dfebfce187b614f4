"""A replica's engine, simulated: it serves all who wait in one pass, and others wait meanwhile."""

from __future__ import annotations

from collections.abc import Callable

from tandem.traces.costs import Curve

# As tandem/engine/gathering.py has them: nobody is as punctual as his average.
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


_Job = tuple[int, float, Callable[[float], None]]


class Engine:
    """One engine.

    A step takes what its batch takes, and the prompts in it what they take beyond. As
    tandem/engine/gathering.py has it, a step waits up to the length of the last one for sequences
    that should be back by then, once for each of their absences.

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
        *("_absent", "_at", "_awaited", "_batch", "_commonly", "_gather", "_gathering", "_last"),
        *("_running", "_times", "_usual", "_waiting", "_wakes", "active", "busy_s", "served"),
        "steps",
    )

    def __init__(
        self, times: Times, gather: float, at: Callable[[float, Callable[[float], None]], None]
    ) -> None:
        self.active = 0
        self.busy_s = 0.0
        self.steps = self.served = 0
        self._times, self._gather, self._at = times, gather, at
        self._running = self._gathering = False
        self._last = 0.0
        self._waiting: list[_Job] = []
        self._batch: list[_Job] = []
        # Who is away since when; how long each is as a rule, and the others are.
        self._absent: dict[int, float] = {}
        self._usual: dict[int, float] = {}
        self._commonly: float | None = None
        # For whom a step waits now, and until when at most.
        self._awaited: dict[int, float] = {}
        self._wakes = 0

    def ask(self, now: float, text: int, extra_s: float, done: Callable[[float], None]) -> None:
        """A text has a step to be done.

        Args:
            now: the moment.
            text: whose.
            extra_s: that it takes beyond a sequence's share: a prompt's.
            done: called at its end.
        """
        self._come(now, text)
        self._waiting.append((text, extra_s, done))
        if self._running:
            return
        if not self._gathering:
            self._gather_some(now)
        elif self._awaited.pop(text, None) is not None:
            self._go_or_wait(now)

    def drop(self, text: int) -> None:
        """A text is over."""
        self._absent.pop(text, None)
        self._usual.pop(text, None)
        self._awaited.pop(text, None)

    def _come(self, now: float, text: int) -> None:
        left = self._absent.pop(text, None)
        if left is None:
            return
        away, before = now - abs(left), self._usual.get(text)
        self._commonly = self._usual[text] = away if before is None else (away + before) / 2

    def _gather_some(self, now: float) -> None:
        """Find out for whom the step that could begin now should wait."""
        self._gathering = True
        until = now + self._gather * self._last
        for text, left in self._absent.items():
            usual = self._usual.get(text, self._commonly)
            # Less than 0: a step has waited for it since it left.
            if usual is not None and left >= 0 and left + usual <= until:
                self._awaited[text] = min(left + usual * _GRACE + _GRACE_SECONDS, until)
        self._go_or_wait(now)

    def _go_or_wait(self, now: float) -> None:
        latest = max(self._awaited.values(), default=now)
        if latest <= now:
            self._start(now)
            return
        self._wakes += 1
        wake = self._wakes

        def overdue(moment: float) -> None:
            if self._gathering and self._wakes == wake:
                self._start(moment)

        self._at(latest, overdue)

    def _start(self, now: float) -> None:
        for text in self._awaited:  # who is late delays no other step
            self._absent[text] = -abs(self._absent[text])
        self._awaited.clear()
        self._gathering = False
        self._batch, self._waiting = self._waiting, []
        self._running = True
        size = min(len(self._batch), len(self._times.of) - 1)
        self._last = self._times.of[size] + sum(job[1] for job in self._batch)
        self.busy_s += self._last
        self.steps += 1
        self.served += len(self._batch)
        self._at(now + self._last, self._end)

    def _end(self, now: float) -> None:
        ended, self._batch = self._batch, []
        for text, _, done in ended:
            self._absent[text] = now
            done(now)
        # Only now: a text may have asked again at once.
        self._running = False
        if self._waiting:
            self._gather_some(now)

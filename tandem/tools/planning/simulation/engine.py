"""A replica's engine, simulated: it serves all who wait in one pass, and others wait meanwhile."""

from __future__ import annotations

from collections.abc import Callable

from tandem.tools.traces.prediction.costs import Curve

# As tandem/engine/gathering.py has them: nobody is as punctual as his average.
_GRACE = 1.5
_GRACE_SECONDS = 0.001


class Times:
    """Lengths of an engine's passes by their batch, computed once each.

    Args:
        curve: of a pass.
        most: sequences in a batch.
    """

    def __init__(self, curve: Curve, most: int) -> None:
        self.of = [0.0, *(curve.at(size) for size in range(1, most + 1))]


class _Job:
    """A step of a text: so many passes, each with what it takes beyond its batch."""

    __slots__ = ("done", "extra_s", "passes", "text")

    def __init__(
        self, text: int, passes: int, extra_s: float, done: Callable[[float], None]
    ) -> None:
        self.text, self.passes, self.extra_s, self.done = text, passes, extra_s, done


class SimulatedEngine:
    """One engine.

    A pass takes what its batch takes, and the prompts in it what they take beyond. As
    tandem/engine/gathering.py has it, a pass waits up to the length of the last one for sequences
    that should be back by then, once for each of their absences.

    Attributes:
        active: texts that hold a place.
        busy_s: in passes, in all.
        passes: how many.
        served: sequences in those passes, in all.

    Args:
        times: of its passes.
        gather: share of the last pass that it waits at most.
        at: calls a function at a moment.
    """

    __slots__ = (
        *("_absent", "_at", "_awaited", "_batch", "_commonly", "_gather", "_gathering", "_last"),
        *("_latest", "_running", "_times", "_usual", "_waiting", "_wake", "active", "busy_s"),
        *("passes", "served"),
    )

    def __init__(
        self, times: Times, gather: float, at: Callable[[float, Callable[[float], None]], None]
    ) -> None:
        self.active = 0
        self.busy_s = 0.0
        self.passes = self.served = 0
        self._times, self._gather, self._at = times, gather, at
        self._running = self._gathering = False
        self._last = 0.0
        self._waiting: list[_Job] = []
        self._batch: list[_Job] = []
        # Who is away since when; how long each is as a rule, and the others are.
        self._absent: dict[int, float] = {}
        self._usual: dict[int, float] = {}
        self._commonly: float | None = None
        # For whom a pass waits now, and until when at most; the same in order, the latest last.
        self._awaited: dict[int, float] = {}
        self._latest: list[tuple[float, int]] = []
        self._wake = 0.0

    def ask(
        self,
        now: float,
        text: int,
        done: Callable[[float], None],
        passes: int = 1,
        extra_s: float = 0.0,
    ) -> None:
        """A text has a step to be done.

        Args:
            now: the moment.
            text: whose.
            done: called at its end. Must not ask in it, but at a later moment.
            passes: of the step.
            extra_s: that each takes beyond what its batch takes: a prompt's.
        """
        self._come(now, text)
        self._waiting.append(_Job(text, passes, extra_s, done))
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
        """Find out for whom the pass that could begin now should wait."""
        self._gathering = True
        until = now + self._gather * self._last
        for text, left in self._absent.items():
            usual = self._usual.get(text, self._commonly)
            # Less than 0: a pass has waited for it since it left.
            if usual is not None and left >= 0 and left + usual <= until:
                self._awaited[text] = min(left + usual * _GRACE + _GRACE_SECONDS, until)
        self._latest = sorted((until, text) for text, until in self._awaited.items())
        self._wake = 0.0
        self._go_or_wait(now)

    def _go_or_wait(self, now: float) -> None:
        latest, awaited = self._latest, self._awaited
        while latest and latest[-1][1] not in awaited:
            latest.pop()
        until = latest[-1][0] if latest else now
        if until <= now:
            self._start(now)
        elif until != self._wake:
            self._wake = until
            self._at(until, self._overdue)

    def _overdue(self, now: float) -> None:
        # Another moment's: the last of those that it was for has come, or the pass has begun.
        if self._gathering and self._wake == now:
            self._start(now)

    def _start(self, now: float) -> None:
        for text in self._awaited:  # who is late delays no other pass
            self._absent[text] = -abs(self._absent[text])
        self._awaited.clear()
        self._gathering = False
        self._batch, self._waiting = self._waiting, []
        self._running = True
        size = min(len(self._batch), len(self._times.of) - 1)
        self._last = self._times.of[size] + sum(job.extra_s for job in self._batch)
        self.busy_s += self._last
        self.passes += 1
        self.served += len(self._batch)
        self._at(now + self._last, self._end)

    def _end(self, now: float) -> None:
        self._running = False
        for job in self._batch:
            job.passes -= 1
            if job.passes:
                self._waiting.append(job)
            else:
                self._absent[job.text] = now
                job.done(now)
        self._batch = []
        if self._waiting:
            self._gather_some(now)

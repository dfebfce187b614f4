"""A replica's engine, simulated: a pass serves all waiting texts, later ones wait for the next."""

from __future__ import annotations

from collections.abc import Callable

from tandem.tools.traces.prediction.costs import Curve

# As in tandem/engine/gathering.py: a sequence may return later than its average.
_GRACE = 1.5
_GRACE_SECONDS = 0.001


class Times:
    """Times of an engine's passes by batch size, each computed once.

    Args:
        curve: time of a pass by batch size.
        most: largest batch size.
    """

    def __init__(self, curve: Curve, most: int) -> None:
        self.of = [0.0, *(curve.at(size) for size in range(1, most + 1))]


class _Job:
    """A step of a text: its number of passes, and the extra time of each."""

    __slots__ = ("done", "extra_s", "passes", "text")

    def __init__(
        self, text: int, passes: int, extra_s: float, done: Callable[[float], None]
    ) -> None:
        self.text, self.passes, self.extra_s, self.done = text, passes, extra_s, done


class SimulatedEngine:
    """One engine.

    The time of a pass depends on its batch size; prompts in it add extra time. As in
    tandem/engine/gathering.py, a pass waits up to the time of the last pass for sequences that
    should be back by then, once for each absence of a sequence.

    Attributes:
        active: texts that hold a slot.
        busy_s: total time of passes.
        passes: number of passes.
        served: sequences in those passes, in total.

    Args:
        times: of its passes.
        gather: longest wait for others, as a share of the last pass.
        at: schedules a function for a time.
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
        # Since when each absent text is away; its usual absence; that of the latest text to return.
        self._absent: dict[int, float] = {}
        self._usual: dict[int, float] = {}
        self._commonly: float | None = None
        # The texts that a pass waits for, each with its deadline; the same sorted by deadline.
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
        """A text asks for a step.

        Args:
            now: current time.
            text: that asks.
            done: is called at the end of the step. It must not call `ask` itself, only schedule it.
            passes: of the step.
            extra_s: added to the time of each pass, for a prompt.
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
        """Decide which texts the next pass should wait for."""
        self._gathering = True
        until = now + self._gather * self._last
        for text, left in self._absent.items():
            usual = self._usual.get(text, self._commonly)
            # Negative: a pass has already waited for this text since it left.
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
        # Otherwise this alarm is outdated: its last text has come, or the pass has begun.
        if self._gathering and self._wake == now:
            self._start(now)

    def _start(self, now: float) -> None:
        for text in self._awaited:  # a text that is late delays no second pass
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

"""A piece of work that the event loop gives to the engine thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from tandem.engine.asks import Ask, Draw, DrawFrom, DrawTogether, Lap, Review, Steps, Take
from tandem.telemetry.stages import StageTimes
from tandem.telemetry.tracing.ids import SpanIds

T = TypeVar("T")


class JobReport(NamedTuple):
    """A result that came before a job's end.

    Attributes:
        result: of the report.
        times: where its time went.
        laps: what came before it and has times of its own, each with its step.
    """

    result: Any
    times: StageTimes
    laps: Sequence[tuple[str, StageTimes]]


@dataclass(eq=False, slots=True)
class Job(Generic[T]):
    """The steps of one sequence, until they return.

    Attributes:
        sequence: whose they are.
        steps: yields asks, and is sent their answers. Engine thread.
        request_id: for the log.
        ask: what it waits for.
        chunk: prompt tokens that the step at hand takes.
        opens: whether it is its sequence's first.
        grows: whether that sequence holds less memory than it was promised.
        drafting: whether it has drawn tokens that are not reported, or handed over at its end.
        idle: whether no text waits for it: it is computed where nothing else is to be.
        on_report: takes each result that comes before the end, on the event loop.
        result: what the steps returned.
        traced: the span that the job is done for, where there is one.
        times: where the job's time went since its last report or lap, filled in as it runs.
        reports: results that were not told yet. Engine thread.
        done: resolved at the job's end.
        arrived_ns: when it was given to the engine, of time.perf_counter_ns().
        idle_ns: since when it waits for a step; the same clock.
    """

    sequence: Any
    steps: Steps[T]
    request_id: str = ""
    traced: SpanIds | None = None
    ask: Ask | None = None
    chunk: int = 0
    opens: bool = False
    drafting: bool = False
    grows: bool = False
    idle: bool = False
    on_report: Callable[[Any, StageTimes], None] | None = None
    result: T | None = None
    times: StageTimes = field(default_factory=StageTimes)
    reports: list[JobReport] = field(default_factory=list)
    done: asyncio.Future[T] = field(init=False)
    arrived_ns: int = field(init=False)
    idle_ns: int = field(init=False)
    _laps: list[tuple[str, StageTimes]] = field(default_factory=list)
    _over: bool = False
    _error: BaseException | None = None

    def arrive(self) -> None:
        """Stamp the arrival, on the event loop that awaits the job."""
        self.done = asyncio.get_running_loop().create_future()
        self.arrived_ns = self.idle_ns = time.perf_counter_ns()
        if self.traced is not None:
            self.times.stamps = []

    @property
    def opening(self) -> bool:
        """Whether it takes a prompt in, which may come in chunks."""
        return isinstance(self.ask, Take)

    @property
    def tokens(self) -> int:
        """New tokens of its next feed; of a prompt, all that are left."""
        ask = self.ask
        if isinstance(ask, Take):
            return ask.left
        return 0 if ask is None else len(ask.feed.token_ids)  # type: ignore[union-attr]

    def start(self, gathering_ns: int, now_ns: int) -> None:
        """A step begins, before which the engine waited for others from `gathering_ns` on."""
        self.drafting |= isinstance(self.ask, (Draw, DrawTogether, Review))
        self.times.waited(self.idle_ns, gathering_ns, now_ns)
        self.idle_ns = now_ns

    def resume(self, answer: Any = None) -> None:
        """Go on with an answer, or an error in its place, to the next ask or the end."""
        try:
            if isinstance(answer, Exception):
                self.ask = self.steps.throw(answer)
            else:
                self.ask = self.steps.send(answer)
            while isinstance(self.ask, (Lap, DrawFrom)):
                self.ask = self.steps.send(self._at_once(self.ask))
        except StopIteration as stop:
            self.ask, self.result, self._over = None, stop.value, True
        except Exception as error:
            self.end(error)

    def _at_once(self, ask: Lap | DrawFrom) -> Any:
        """The answer to an ask that waits for nothing."""
        if isinstance(ask, Lap):
            return self._lap(ask.step)
        # Here, since most methods without a model run where torch is not installed.
        from tandem.engine.numbers.known_rows import draw_from

        return draw_from(ask)

    def report(self, result: Any) -> None:
        """Keep a result for the end of the step, and go on."""
        laps, self._laps = self._laps, []
        self.reports.append(JobReport(result, self._turn(), laps))
        self.drafting = False
        self.resume()

    def _lap(self, step: str) -> StageTimes:
        """The times so far, kept as those of a step."""
        times = self._turn()
        self._laps.append((step, times))
        return times

    def _turn(self) -> StageTimes:
        """The times so far; what follows has new ones."""
        times = self.times
        self.times = StageTimes(stamps=None if times.stamps is None else [])
        return times

    def take_reports(self) -> Sequence[JobReport]:
        """Those that were not told yet. Engine thread."""
        reports, self.reports = self.reports, []
        return reports

    def tell(self, reports: Sequence[JobReport]) -> None:
        """Hand reports over, unless no task waits for the job any more. Event loop."""
        for reported in reports:
            if self.on_report is not None and not self.done.cancelled():
                self.on_report(reported.result, reported.times)

    @property
    def over(self) -> bool:
        """Whether the job has ended, or no task waits for it any more."""
        return self._over or self.done.cancelled()

    @property
    def answers_at_end(self) -> bool:
        """Whether its end is a result that somebody waits for, and no mere end of reports."""
        answers = self.on_report is None and not self.idle
        return answers and self._error is None and not self.done.cancelled()

    @property
    def error(self) -> BaseException | None:
        """What the job failed with."""
        return self._error

    def end(self, error: BaseException) -> None:
        """Mark a failure; the waiter wakes when the step is measured. Engine thread.

        An error counts even after an end: the rest of the step may have failed.
        """
        self.ask, self._over, self._error = None, True, self._error or error

    def replace_error(self, error: BaseException) -> None:
        """Fail with another sentence: one that may leave the process."""
        self._error = error

    def resolve(self) -> None:
        """Wake the waiter up. Event loop."""
        if self.done.done():
            return
        if self._error is None:
            self.done.set_result(self.result)  # type: ignore[arg-type]  # T may be None
        elif self.idle:
            self.done.cancel()
        else:
            self.done.set_exception(self._error)

"""One thread that runs the steps of many sequences, and the jobs that the event loop gives it."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

import structlog

from tandem.engine.admission import Admission, AdmittedSequence, RoomWanted
from tandem.engine.asks import Steps
from tandem.engine.gathering import Gathering
from tandem.engine.growing import GrowingSequences
from tandem.engine.job import Job, JobReport
from tandem.engine.schedule import BatchLimits, saved_behind, select
from tandem.errors import EngineFailure, TandemError, Unavailable
from tandem.profile import Profile
from tandem.telemetry.stages import StageTimes
from tandem.telemetry.tracing.ids import SpanIds

_log = structlog.get_logger(__name__)

# A step takes less, unless it hangs: then the process ends without its thread.
_STOP_SECONDS = 20.0

T = TypeVar("T")
# A job, its step ("" for what it was begun for), and where the time of that went.
Answered = tuple[Job[Any], str, StageTimes]


# A report is told after this many further steps at most, if none of them waits for the device.
_MOST_HELD = 2


class StepRunner(Protocol):
    """Who answers asks."""

    @property
    def ahead(self) -> bool:
        """Whether a device works by itself, while the host does something else."""

    def step(self, jobs: Sequence[Job[Any]], meanwhile: Callable[[], None]) -> None:
        """Answer the jobs' asks, until each asks for another pass, or is over.

        Args:
            jobs: whose asks; at least one.
            meanwhile: is called before each wait for the device, which then has work.
        """

    def settle(self) -> None:
        """Book the times of all that was reported. `step` does so itself where a job is over or
        idle, or where the device is not `ahead`."""

    def answers(self) -> bool:
        """Whether the device still works."""


class Engine:
    """Jobs in, steps over all of them, results out.

    The thread takes all that is ready and runs it step by step; between two steps jobs may
    join, end or be given up (continuous batching). A sequence has at most one job at a time, and
    one that is given up, so the queue never holds more than twice `max_sequences` jobs.

    Attributes:
        admission: which sequences have a slot.
        on_device_lost: called on the event loop when the device is lost or the thread has failed.
        on_answered: called there with the times of results, when those who wait for them have
            them.
        on_given_back: called in the engine's thread with the number of sequences whose memory older
            ones took.
        on_step: called in the engine's thread with the number of jobs that share a step, unless
            no task waits for it.

    Args:
        name: of the thread.
        admission: of this engine's sequences.
        limits: on a step.
        stepper: answers the jobs' asks; None where no job has any.
    """

    def __init__(
        self, name: str, admission: Admission, limits: BatchLimits, stepper: StepRunner | None
    ) -> None:
        self.admission = admission
        self.on_device_lost: Callable[[], None] = lambda: None
        self.on_answered: Callable[[Sequence[Answered]], None] = lambda _: None
        self.on_given_back: Callable[[int], None] = lambda sequences: None
        self.on_step: Callable[[int], None] = lambda jobs: None
        self._stepper = stepper
        self._limits = limits
        self._loop: asyncio.AbstractEventLoop | None = None
        self._jobs: list[Job[Any]] = []  # the engine thread's, as are the next two
        self._gathering: Gathering[AdmittedSequence] = Gathering()
        self._growing = GrowingSequences(admission.reclaim)
        self._step_seconds = 0.0
        # Reports that are not told yet, of jobs that go on; and steps since reports were last told.
        self._untold: list[tuple[Job[Any], Sequence[JobReport]]] = []
        self._held = 0
        self._saved = self._most_saved = limits.most_saved
        self._arrivals: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        self._released: queue.SimpleQueue[AdmittedSequence] = queue.SimpleQueue()
        # Why no job is taken any more; empty while the engine runs.
        self._closed = ""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def expect(self, profile: Profile) -> None:
        """Size the next chunks of prompts by other passes; from any thread."""
        self._limits = replace(self._limits, profile=profile)
        self._most_saved = self._limits.most_saved

    def start(self) -> None:
        """Start the thread, for awaitables on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """Fail what is waiting, and end the thread. Not on the event loop: it waits for a step."""
        self._close("the engine is stopping; try another replica")
        self._arrivals.put(None)
        self._thread.join(_STOP_SECONDS)

    def release(self, sequence: AdmittedSequence) -> None:
        """Give a sequence's slot back now, and its memory between two steps.

        Never waits, so it is safe in any `finally`.
        """
        if self.admission.release(sequence):
            self._released.put(sequence)
            self._arrivals.put(None)

    async def open(
        self,
        sequence: AdmittedSequence,
        steps: Steps[T],
        room: RoomWanted,
        request_id: str = "",
        traced: SpanIds | None = None,
    ) -> tuple[T, StageTimes]:
        """Admit a sequence, then run its first steps; waiting for room counts as queueing.

        Raises:
            InvalidRequest: it could never fit.
            Exhausted: no room, and too many wait already or it waited for too long.
            OutOfRoom: older sequences took its memory.
            Unavailable, TandemError: as `run`.
        """
        job = Job(sequence, steps, request_id, traced)
        job.arrive()
        job.opens = True
        job.grows = await self.admission.admit(sequence, room)
        return await self._run_job(job)

    async def run(
        self,
        sequence: AdmittedSequence,
        steps: Steps[T],
        request_id: str = "",
        traced: SpanIds | None = None,
        on_report: Callable[[Any, StageTimes], None] | None = None,
    ) -> tuple[T, StageTimes]:
        """Run an open sequence's next steps; their result, and where the time went.

        Args:
            sequence: whose they are.
            steps: asks, up to the result.
            request_id: for the log.
            traced: the span that they are done for, where there is one.
            on_report: takes what they report on the way, each with the times since the last one.

        Raises:
            Unavailable: the engine is stopping, or its device is gone.
            OutOfRoom: older sequences took the sequence's memory.
            TandemError: as the steps failed.
        """
        job = Job(sequence, steps, request_id, traced)
        job.on_report = on_report
        job.arrive()
        return await self._run_job(job)

    def run_idle(
        self, sequence: AdmittedSequence, steps: Steps[None], request_id: str = ""
    ) -> asyncio.Future[None]:
        """Run steps of an open sequence whenever no other job waits for a step.

        Args:
            sequence: whose they are. Its next job comes after their end.
            steps: see `run`; what they fail with is logged.
            request_id: for the log.

        Returns:
            Done at their end, or cancelled where they fail. To cancel it ends them, but for a step
            that is being computed.
        """
        job = Job(sequence, steps, request_id)
        job.idle = True
        job.arrive()
        self._arrivals.put(job)
        if self._closed:
            job.done.cancel()
        return job.done

    async def _run_job(self, job: Job[T]) -> tuple[T, StageTimes]:
        if self._closed:
            raise Unavailable(self._closed)
        self._arrivals.put(job)
        if self._closed:
            # The thread may have ended in between, and never see the job.
            job.done.cancel()
            raise Unavailable(self._closed)
        return await job.done, job.times

    def _run(self) -> None:
        """The thread. Without it no request would ever be answered, so its end is never silent."""
        try:
            self._run_steps()
        except Exception:
            _log.exception("the engine's thread failed")
            self._lose("the engine has failed; try another replica")
        self._tell()
        self._jobs += self._take(0)
        for job in self._jobs:
            job.end(Unavailable(self._closed))
        self._wake(self._jobs)

    def _run_steps(self) -> None:
        while not self._closed:
            if not self._jobs:
                self._tell()
            self._jobs += self._take(0 if self._jobs else None)
            gathering_ns = time.perf_counter_ns()
            self._gather()
            self._jobs = _going_on(self._jobs)
            opened = self.admission.open_sequences
            batch = select(self._jobs, opened, self._limits, self._saved)
            with_room = self._with_room(batch)
            if with_room is None:
                continue
            if batch := with_room:
                if self._saved < self._most_saved or any(job.opening for job in batch):
                    self._saved = saved_behind(batch, self._jobs, self._saved, self._limits)
                self._guarded_step(batch, gathering_ns)
                self._jobs = _going_on(self._jobs)
            else:
                self._tell()

    def _take(self, timeout: float | None) -> list[Job[Any]]:
        """All jobs that have arrived; up to `timeout` seconds later if none has, None for ever.

        Each runs up to its first ask; those that have none are through.
        """
        arrived: list[Job[Any]] = []
        through: list[Job[Any]] = []
        while True:
            try:
                job = self._arrivals.get(timeout != 0, timeout)
            except queue.Empty:
                break
            timeout = 0
            if job is None:
                continue
            if job.over:  # given up on the way; its sequence may be gone
                job.steps.close()
                continue
            if refusal := self._growing.refusal(job.sequence):
                job.steps.close()
                job.end(refusal)
                through.append(job)
                continue
            if job.grows:
                self._growing.begin(job.sequence)
            if not job.idle:
                self._gathering.come(job.sequence, job.arrived_ns / 1e9)
            taken_ns = time.perf_counter_ns()
            job.resume()
            if job.over:  # it asked for no pass: no other was waited for
                job.start(taken_ns, taken_ns)
            (through if job.over else arrived).append(job)
        self._leave(through, time.perf_counter())
        self._reclaim()
        return arrived

    def _gather(self) -> None:
        """Wait a little for those who would otherwise miss the step by little."""
        if not self._limits.gather or all(job.idle for job in self._jobs):
            return
        now = time.perf_counter()
        until = now + self._limits.gather * self._step_seconds
        while self._jobs and not self._closed:
            patience = self._gathering.patience(time.perf_counter(), until)
            if patience <= 0:
                break
            self._tell()
            self._jobs += self._take(patience)
        self._gathering.waited(until)

    def _reclaim(self) -> None:
        """Take the memory of released sequences back."""
        reclaimed = False
        while not self._released.empty():
            sequence = self._released.get()
            self._gathering.drop(sequence)
            if self._growing.end(sequence):
                self.admission.reclaim(sequence)
            else:  # its memory was taken before
                self.admission.forget(sequence)
            reclaimed = True
        if reclaimed:
            self._on_loop(self.admission.admit_waiting)

    def _with_room(self, batch: list[Job[Any]]) -> list[Job[Any]] | None:
        """The jobs of a selected step that have room; None where jobs were ended to make room,
        after what they had reported was told."""
        made = None
        try:
            made = self._growing.make_room(batch, self._jobs)
        except Exception:  # moving a text takes memory of the device
            _log.exception("no room can be made", requests=[job.request_id for job in batch])
            for job in batch:
                job.end(EngineFailure("the engine failed on this batch; see the service's log"))
            if self._stepper is not None:
                self._check_device(self._stepper)
        if made is not None and not (made.given_back or made.ended):
            waiting = {id(job) for job in made.waiting}
            return [job for job in batch if id(job) not in waiting] if waiting else batch
        self._tell()
        ended = []
        for job in self._jobs:
            if refusal := self._growing.refusal(job.sequence):
                job.end(refusal)
            if job.over:
                ended.append(job)
        self._jobs = _going_on(self._jobs)
        if made is not None and made.given_back:
            _log.info("sequences given back for memory", count=len(made.given_back))
            self.on_given_back(len(made.given_back))
            self._on_loop(partial(self.admission.promise_no_more, made.given_back))
        self._leave(ended, time.perf_counter())
        return None

    def _guarded_step(self, jobs: Sequence[Job[Any]], gathering_ns: int) -> None:
        """A failure of the model ends this batch, and no other sequence."""
        stepper = self._stepper
        assert stepper is not None  # or no job would have asked
        if not jobs[0].idle:
            self.on_step(len(jobs))
        now_ns = time.perf_counter_ns()
        for job in jobs:
            job.start(gathering_ns, now_ns)
        started = time.perf_counter()
        if self._held == _MOST_HELD:
            self._tell()
        self._held += 1
        try:
            stepper.step(jobs, self._tell)
        except Exception as error:
            if not isinstance(error, TandemError):
                _log.exception("engine step failed", requests=[job.request_id for job in jobs])
                error = EngineFailure("the engine failed on this batch; see the service's log")
            for job in jobs:
                job.end(error)
            self._check_device(stepper)
        ended_ns = time.perf_counter_ns()
        ended = ended_ns / 1e9
        self._step_seconds = ended - started
        for job in jobs:
            job.idle_ns = ended_ns
        reported = [job for job in jobs if job.reports]
        if reported:
            # A round of a run stands in line again, as one that comes by a message does.
            going_on = [job for job in self._jobs if not job.reports]
            self._jobs = [*going_on, *reported]
        over = [job for job in jobs if job.over]
        if stepper.ahead and not over:
            # The next step is launched first: while the device computes it, the event loop has the
            # interpreter for itself.
            self._untold += [(job, job.take_reports()) for job in reported]
            return
        self._tell()
        self._leave(over, ended, reported)

    def _tell(self) -> None:
        """Hand over what jobs that go on have reported."""
        untold, self._untold, self._held = self._untold, [], 0
        if not untold:
            return
        assert self._stepper is not None  # who answered them
        try:
            self._stepper.settle()
        except Exception:  # the device's: what was decided is told all the same
            _log.exception("the times of a step are not known")
        self._wake([], untold)

    def _leave(
        self, jobs: Sequence[Job[Any]], now: float, reported: Sequence[Job[Any]] = ()
    ) -> None:
        """Log what is a bug of ours, and wake the waiters of ended jobs and of those that have
        something to report, all at once."""
        for job in jobs:
            if not job.idle:
                self._gathering.leave(job.sequence, now)
            error = job.error
            if error is not None and not isinstance(error, TandemError):
                _log.error("a job failed", request_id=job.request_id, exc_info=error)
                job.replace_error(EngineFailure("the engine failed; see the service's log"))
        self._wake(jobs, [(job, job.take_reports()) for job in reported])

    def _wake(
        self,
        jobs: Sequence[Job[Any]],
        reported: Sequence[tuple[Job[Any], Sequence[JobReport]]] = (),
    ) -> None:
        if jobs or reported:
            self._on_loop(partial(self._resolve, jobs, reported))

    def _resolve(
        self, jobs: Sequence[Job[Any]], reported: Sequence[tuple[Job[Any], Sequence[JobReport]]]
    ) -> None:
        answered: list[Answered] = []
        for job, reports in reported:
            job.tell(reports)
            for one in reports:
                answered += [(job, step, times) for step, times in one.laps]
                answered.append((job, "", one.times))
        for job in jobs:
            if job.answers_at_end:
                answered.append((job, "", job.times))
            job.resolve()
        self.on_answered(answered)

    def _check_device(self, stepper: StepRunner) -> None:
        """After a failure: stop for good if the device does not answer."""
        if stepper.answers():
            return
        _log.error("device lost")
        self._lose("the device is gone; try another replica")

    def _lose(self, reason: str) -> None:
        """Stop for good, and say so. Engine thread."""
        self._close(reason)
        self._on_loop(self.on_device_lost)

    def _close(self, reason: str) -> None:
        """Take no job any more. From any thread."""
        self._closed = reason
        self._on_loop(partial(self.admission.close, reason))

    def _on_loop(self, call: Callable[[], object]) -> None:
        """Have the event loop do something, if it still runs."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call)


def _going_on(jobs: Sequence[Job[Any]]) -> list[Job[Any]]:
    """The jobs that are not over; the steps of those that were given up are closed."""
    going_on = []
    for job in jobs:
        if job.over:
            job.steps.close()
        else:
            going_on.append(job)
    return going_on

"""One thread that owns the device, and the jobs that the event loop gives it."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import structlog
import torch

from tandem.errors import EngineFailure, TandemError, Unavailable
from tandem.inference.absences import Absences
from tandem.inference.admission import Admission, AdmissionLimits, CachedSequence
from tandem.inference.decoder import Decoder
from tandem.inference.job import Job

_log = structlog.get_logger(__name__)

# A pass takes less, unless it hangs: then the process ends without its thread.
_STOP_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Bounds on one step.

    Attributes:
        token_budget: new tokens of running sequences.
        prefill_chunk: prompt tokens beside them: what a running sequence waits for at most.
        chunk_alone: prompt tokens where no sequence is running, if more.
        gather: how long it may wait for others that should come, as a share of the last step.
    """

    token_budget: int
    prefill_chunk: int
    chunk_alone: int = 0
    gather: float = 0.0


J = TypeVar("J", bound=Job)
S = TypeVar("S", bound=CachedSequence)


class Engine(ABC, Generic[J, S]):
    """Jobs in, batches through the model, results out.

    The thread takes all that is ready and runs it step by step; between two steps jobs may
    join, end or be given up (continuous batching). A sequence has at most one job at a time,
    so the queue never holds more than `max_sequences` jobs.

    Attributes:
        on_device_lost: called on the event loop when the device answers no more.
    """

    def __init__(
        self, name: str, decoder: Decoder, admission: AdmissionLimits, batch: BatchLimits
    ) -> None:
        self.decoder = decoder
        self.admission: Admission[S] = Admission(decoder.pool, admission)
        self.on_device_lost: Callable[[], None] = lambda: None
        self._limits = batch
        self._loop: asyncio.AbstractEventLoop | None = None
        self._jobs: list[J] = []  # the engine thread's, as are the next two
        self._absences: Absences[S] = Absences()
        self._step_seconds = 0.0
        self._arrivals: queue.SimpleQueue[J | None] = queue.SimpleQueue()
        self._released: queue.SimpleQueue[S] = queue.SimpleQueue()
        # Why no job is taken any more; empty while the engine runs.
        self._closed = ""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def _step(self, jobs: Sequence[J]) -> None:
        """Advance jobs by one forward pass, and `end` those that are through. Engine thread."""

    def start(self) -> None:
        """Start the thread, for awaitables on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """Fail what is waiting, and end the thread. Not on the event loop: it waits for a step."""
        self._close("the engine is stopping; try another replica")
        self._arrivals.put(None)
        self._thread.join(_STOP_SECONDS)

    def release(self, sequence: S) -> None:
        """Give a sequence's place back. Never waits, so it is safe in any `finally`."""
        if self.admission.leave(sequence):
            self._released.put(sequence)
            self._arrivals.put(None)

    async def _submit(self, job: J) -> None:
        """Run a job and wait for its end.

        Raises:
            Unavailable: the engine is stopping, or its device is gone.
            TandemError: as the job failed.
        """
        job.arrive()
        await self._run_job(job)

    async def _open(self, job: J, sequence: S, capacity: int) -> None:
        """Admit a sequence, then run its first job; waiting for room counts as queueing.

        Raises:
            InvalidRequest: it could never fit.
            Exhausted: no room, and too many wait already or it waited for too long.
            Unavailable, TandemError: as `_submit`.
        """
        job.arrive()
        await self.admission.admit(sequence, capacity)
        await self._run_job(job)

    async def _run_job(self, job: J) -> None:
        if self._closed:
            raise Unavailable(self._closed)
        if job.prompt or job.tokens:
            self._arrivals.put(job)
            if self._closed:
                # The thread may have ended in between, and never see the job.
                job.done.cancel()
                raise Unavailable(self._closed)
            job.prepare()
            await job.done

    def _run(self) -> None:
        """The thread. Without it nobody would ever be answered, so its end is never silent."""
        try:
            with torch.inference_mode():
                self._run_steps()
        except Exception:
            _log.exception("the engine's thread failed")
            self._lose("the engine has failed; try another replica")
        self._jobs += self._take(0)
        for job in self._jobs:
            job.end(Unavailable(self._closed))
        self._wake(self._jobs)

    def _run_steps(self) -> None:
        while not self._closed:
            self._jobs += self._take(0 if self._jobs else None)
            self._gather()
            self._jobs = [job for job in self._jobs if not job.over]
            if batch := self._select(self._jobs):
                self._guarded_step(batch)
                self._jobs = [job for job in self._jobs if not job.over]

    def _take(self, timeout: float | None) -> list[J]:
        """All jobs that have arrived; up to `timeout` seconds later if none has, None for ever."""
        arrived: list[J] = []
        while True:
            try:
                job = self._arrivals.get(timeout != 0, timeout)
            except queue.Empty:
                break
            timeout = 0
            if job is not None:
                self._absences.come(job.sequence, job.arrived_ns / 1e9)
                arrived.append(job)
        self._free_released()
        return arrived

    def _gather(self) -> None:
        """Wait a little for those who would otherwise miss the step by little."""
        now = time.perf_counter()
        until = now + self._limits.gather * self._step_seconds
        while self._jobs and not self._closed:
            patience = self._absences.patience(time.perf_counter(), until)
            if patience <= 0:
                break
            self._jobs += self._take(patience)
        self._absences.waited(until)

    def _free_released(self) -> None:
        freed = False
        while not self._released.empty():
            sequence = self._released.get()
            self._absences.forget(sequence)
            self.admission.free(sequence)
            freed = True
        if freed:
            self._on_loop(self.admission.grant)

    def _select(self, jobs: Sequence[J]) -> list[J]:
        """The next step: running sequences first come, first served, and a chunk of prompts.

        The oldest of either kind always takes part, so none starves.
        """
        selected: list[J] = []
        budget = self._limits.token_budget
        for job in jobs:
            if not job.prompt and (job.tokens <= budget or not selected):
                budget -= job.tokens
                selected.append(job)
        return selected + self._share_chunk([job for job in jobs if job.prompt])

    def _share_chunk(self, opening: Sequence[J]) -> list[J]:
        """Half of the chunk for the oldest prompt, the rest for those who had least so far.

        So a short prompt does not wait for a long one, and a long one not for all that come.
        """
        if not opening:
            return []
        oldest, *others = opening
        chunk = self._limits.prefill_chunk
        if self.admission.open_sequences <= len(opening):  # nobody's round has to wait
            chunk = max(chunk, self._limits.chunk_alone)
        oldest.chunk = min(len(oldest.prompt), chunk - chunk // 2)
        left = chunk - oldest.chunk
        for job in sorted(others, key=lambda job: job.taken):
            job.chunk = min(left, len(job.prompt))
            left -= job.chunk
        oldest.chunk = min(len(oldest.prompt), oldest.chunk + left)
        return [job for job in opening if job.chunk]

    def _guarded_step(self, jobs: Sequence[J]) -> None:
        """A failure of the model ends this batch, and no other sequence."""
        for job in jobs:
            job.start()
        before, started = self.decoder.forward_ns, time.perf_counter()
        try:
            self._step(jobs)
        except Exception as error:
            if not isinstance(error, TandemError):
                _log.exception("engine step failed", requests=[job.request_id for job in jobs])
                error = EngineFailure("the engine failed on this batch; see the service's log")
            for job in jobs:
                job.end(error)
            self._check_device()
        spent, ended = self.decoder.forward_ns - before, time.perf_counter()
        self._step_seconds = ended - started
        for job in jobs:
            job.times.forward_ns += spent
            job.times.batch_size = len(jobs)
            if job.over:
                self._absences.leave(job.sequence, ended)
        self._wake([job for job in jobs if job.over])

    def _wake(self, jobs: Sequence[J]) -> None:
        """Wake the waiters of ended jobs, all at once."""
        if jobs:
            self._on_loop(lambda: [job.resolve() for job in jobs])

    def _check_device(self) -> None:
        """After a failure: stop for good if the device does not answer."""
        if self._device_answers():
            return
        _log.error("device lost", device=str(self.decoder.device))
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

    def _device_answers(self) -> bool:
        try:
            return bool(torch.ones(1, device=self.decoder.device).item() == 1)
        except Exception:
            _log.exception("device does not answer")
            return False

"""One thread that owns the device, and the jobs that the event loop gives it."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import structlog
import torch

from tandem.errors import EngineFailure, Exhausted, TandemError, Unavailable
from tandem.inference.decoder import Decoder
from tandem.telemetry.stages import StageTimes

_log = structlog.get_logger(__name__)


@dataclass(eq=False)
class Job:
    """A piece of work for the engine thread, of one sequence.

    Attributes:
        times: where the job's time went, filled in as it runs.
    """

    times: StageTimes = field(default_factory=StageTimes, init=False)
    done: asyncio.Future[None] = field(init=False)
    _arrived_ns: int = field(init=False)
    _started: bool = field(default=False, init=False)
    _over: bool = field(default=False, init=False)

    def arrive(self) -> None:
        """Stamp the arrival, on the event loop that awaits the job."""
        self.done = asyncio.get_running_loop().create_future()
        self._arrived_ns = time.perf_counter_ns()

    def start(self) -> None:
        """Mark the end of the queueing. Engine thread."""
        if not self._started:
            self._started = True
            self.times.queue_ns = time.perf_counter_ns() - self._arrived_ns

    @property
    def over(self) -> bool:
        """Whether the job has ended, or nobody waits for it any more."""
        return self._over or self.done.cancelled()

    def finish(self, error: BaseException | None = None) -> None:
        """Wake the waiter up. Engine thread."""
        self._over = True
        loop = self.done.get_loop()
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._resolve, error)

    def _resolve(self, error: BaseException | None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


J = TypeVar("J", bound=Job)
S = TypeVar("S")


class Engine(ABC, Generic[J, S]):
    """Jobs in, batches through the model, results out.

    The thread takes all that is ready and runs it step by step; between two steps jobs may
    join, end or be given up. A sequence has at most one job at a time, so the queue never
    holds more than `max_sequences` jobs.
    """

    def __init__(self, name: str, decoder: Decoder, max_sequences: int) -> None:
        self.decoder = decoder
        self.max_sequences = max_sequences
        self.opened_sequences = 0
        self._sequences: set[S] = set()
        self._arrivals: queue.SimpleQueue[J | None] = queue.SimpleQueue()
        self._released: queue.SimpleQueue[S] = queue.SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def _step(self, jobs: list[J]) -> None:
        """Advance jobs by one step, finishing those that end. Engine thread."""

    @abstractmethod
    def _free(self, sequence: S) -> None:
        """Give up a sequence's memory. Engine thread."""

    @property
    def open_sequences(self) -> int:
        """Sequences that hold a place now."""
        return len(self._sequences)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Fail what is waiting, and end the thread."""
        self._stopping = True
        self._arrivals.put(None)
        self._thread.join()

    def _admit(self, sequence: S) -> None:
        """Take a place.

        Raises:
            Exhausted: every place is taken.
        """
        if len(self._sequences) >= self.max_sequences:
            raise Exhausted(
                f"all {self.max_sequences} sequences are taken; try another replica, or later"
            )
        self._sequences.add(sequence)
        self.opened_sequences += 1

    def release(self, sequence: S) -> None:
        """Give a sequence's place back. Never waits, so it is safe in any `finally`."""
        if sequence in self._sequences:
            self._sequences.discard(sequence)
            self._released.put(sequence)
            self._arrivals.put(None)

    async def _submit(self, job: J) -> None:
        """Run a job and wait for its end.

        Raises:
            Unavailable: the engine is stopping.
            TandemError: as the job failed.
        """
        if self._stopping:
            raise Unavailable("the engine is stopping; try another replica")
        job.arrive()
        self._arrivals.put(job)
        await job.done

    def _run(self) -> None:
        jobs: list[J] = []
        with torch.inference_mode():
            while not self._stopping:
                jobs.extend(self._take(wait=not jobs))
                jobs = [job for job in jobs if not job.over]
                if jobs:
                    self._guarded_step(jobs)
                    jobs = [job for job in jobs if not job.over]
        for job in jobs + self._take(wait=False):
            job.finish(Unavailable("the engine is stopping; try another replica"))

    def _take(self, wait: bool) -> list[J]:
        """All jobs that have arrived; with `wait`, at least one event."""
        arrived: list[J] = []
        while True:
            try:
                job = self._arrivals.get(block=wait and not arrived)
            except queue.Empty:
                break
            wait = False
            if job is not None:
                arrived.append(job)
        while not self._released.empty():
            self._free(self._released.get())
        return arrived

    def _guarded_step(self, jobs: list[J]) -> None:
        try:
            self._step(jobs)
        except Exception as error:
            if not isinstance(error, TandemError):
                _log.exception("engine step failed", jobs=len(jobs))
                error = EngineFailure("the engine failed on this batch; see the service's log")
            for job in jobs:
                job.finish(error)

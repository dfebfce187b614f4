"""A piece of work that the event loop gives to the engine thread."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import structlog

from tandem.telemetry.stages import StageTimes


@dataclass(eq=False)
class Job:
    """A piece of work for the engine thread, of one sequence.

    Attributes:
        sequence: whose it is.
        request_id: for the log.
        prompt: tokens still to take in, chunk by chunk; empty for a step of a running sequence.
        chunk: how many of them the step at hand takes.
        taken: how many were taken in so far.
        times: where the job's time went, filled in as it runs.
        done: resolved at the job's end.
        arrived_ns: when it was given to the engine, of time.perf_counter_ns().
    """

    sequence: Any = field(init=False)
    request_id: str = field(default="", init=False)
    prompt: list[int] = field(default_factory=list, init=False)
    chunk: int = field(default=0, init=False)
    taken: int = field(default=0, init=False)
    times: StageTimes = field(default_factory=StageTimes, init=False)
    done: asyncio.Future[None] = field(init=False)
    arrived_ns: int = field(init=False)
    _started: bool = field(default=False, init=False)
    _over: bool = field(default=False, init=False)
    _error: BaseException | None = field(default=None, init=False)

    @property
    def tokens(self) -> int:
        """New tokens that the next step would feed, besides the prompt's."""
        return 0

    def prepare(self) -> None:
        """Compute what the end of the step will need, beside its pass. Event loop.

        Only pure functions: the engine thread computes what is not there yet.
        """

    def arrive(self) -> None:
        """Stamp the arrival, on the event loop that awaits the job."""
        self.request_id = str(structlog.contextvars.get_contextvars().get("request_id", ""))
        self.done = asyncio.get_running_loop().create_future()
        self.arrived_ns = time.perf_counter_ns()

    def start(self) -> None:
        """Mark the end of the queueing. Engine thread."""
        if not self._started:
            self._started = True
            self.times.queue_ns = time.perf_counter_ns() - self.arrived_ns

    def take_chunk(self) -> list[int]:
        """The prompt tokens of this step. Engine thread."""
        tokens, self.prompt = self.prompt[: self.chunk], self.prompt[self.chunk :]
        self.taken += self.chunk
        return tokens

    @property
    def over(self) -> bool:
        """Whether the job has ended, or nobody waits for it any more."""
        return self._over or self.done.cancelled()

    def end(self, error: BaseException | None = None) -> None:
        """Mark the end; the waiter wakes when the step is measured. Engine thread.

        An error counts even behind an end: the rest of the step may have failed.
        """
        self._over, self._error = True, self._error or error

    def resolve(self) -> None:
        """Wake the waiter up. Event loop."""
        if self.done.done():
            return
        if self._error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(self._error)

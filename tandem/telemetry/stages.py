"""Where time goes: the one list of stages, a step's times in a service, and a request's clock."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

# What a text waits for in the orchestrator: exclusive parts of its wall time, `own` the rest.
WAITS = {
    "tokenize": "turning the prompt into ids",
    "place_wait": "for a place on a target",
    "open_wait": "for its sequences to be opened",
    "draft_wait": "for drafts",
    "verify_wait": "for verdicts",
    "detokenize": "turning ids into text",
    "send_wait": "for its client to take a message",
    "close_wait": "for its sequences to be closed",
    "own": "anything else",
}

# What a step does in a service, in this order; passes and numbers take turns in a draft.
READ, QUEUE, GATHER, FORWARD, NUMBERS, REPLY = (
    "read",
    "queue",
    "gather",
    "forward",
    "numbers",
    "reply",
)
STEP_STAGES = {
    READ: "checking the message",
    QUEUE: "until the engine has time",
    GATHER: "while the engine waits for others that should share the pass",
    FORWARD: "in the model's passes",
    NUMBERS: "from a pass to its results on the host: distributions, draws, the verdict",
    REPLY: "from the last result to the encoded reply",
}
# Those that its replies tell.
ENGINE_STAGES = (QUEUE, GATHER, FORWARD, NUMBERS)
# What the numbers of a step are called.
_NUMBERS = {"draft": "draw", "verify": "accept", "prefill": "accept"}


# What a text's summary tells of its services, beside the waits: of its openings and its rounds.
BUSY = (
    "drafter_prefill",
    "target_prefill",
    "target_prefill_queue",
    "target_prefill_gather",
    *(f"draft_{stage}" for stage in ("queue", "gather", "forward", "draw")),
    *(f"verify_{stage}" for stage in ("queue", "gather", "forward", "accept")),
)


def span_of(step: str, stage: str) -> str:
    """Name of a stage's span in a step: "draft.forward"."""
    return f"{step}.{name_of(step, stage)}"


def busy_of(step: str, stage: str) -> str:
    """Its name among `BUSY`: "draft_forward"."""
    return f"{step}_{name_of(step, stage)}"


def name_of(step: str, stage: str) -> str:
    """What a stage is called in a step: numbers are drawn in a draft, and accepted elsewhere."""
    return _NUMBERS[step] if stage == NUMBERS else stage


@dataclass(slots=True)
class StageTimes:
    """Stage times of one step in one service, nanoseconds of its monotonic clock.

    Attributes:
        queue_ns: from the checked message until the engine has time for it.
        gather_ns: of the engine's wait for others.
        forward_ns: in passes; the device's time, where it works by itself.
        numbers_ns: from passes to their results on the host.
        batch_size: sequences that shared the last pass.
        stamps: each part with its beginning and end, of time.perf_counter_ns(), where the step
            is traced.
    """

    queue_ns: int = 0
    gather_ns: int = 0
    forward_ns: int = 0
    numbers_ns: int = 0
    batch_size: int = 1
    stamps: list[tuple[str, int, int]] | None = field(default=None, compare=False)

    def of(self, stage: str) -> int:
        """Nanoseconds of one of `ENGINE_STAGES`."""
        nanoseconds: int = getattr(self, f"{stage}_ns")
        return nanoseconds

    def waited(self, since_ns: int, gathering_ns: int, until_ns: int) -> None:
        """Book a wait for a pass, of which the last part was for others."""
        gathering_ns = min(max(since_ns, gathering_ns), until_ns)
        self.queue_ns += gathering_ns - since_ns
        self.gather_ns += until_ns - gathering_ns
        self._stamp(QUEUE, since_ns, gathering_ns)
        self._stamp(GATHER, gathering_ns, until_ns)

    def computed(self, start_ns: int, passed_ns: int, end_ns: int) -> None:
        """Book a pass and what was made of it."""
        self.forward_ns += passed_ns - start_ns
        self.numbers_ns += end_ns - passed_ns
        self._stamp(FORWARD, start_ns, passed_ns)
        self._stamp(NUMBERS, passed_ns, end_ns)

    def _stamp(self, stage: str, start_ns: int, end_ns: int) -> None:
        if self.stamps is not None:
            self.stamps.append((stage, start_ns, end_ns))


class StageClock:
    """Attributes every nanosecond of a request's wall time to exactly one of `WAITS`.

    What happens in no named stage is `own`. Stages do not nest.
    """

    def __init__(self) -> None:
        self._start_ns = self._mark_ns = time.perf_counter_ns()
        self._stage = "own"
        self._spent: dict[str, int] = dict.fromkeys(WAITS, 0)

    def stage(self, name: str) -> StageTimer:
        """A context manager that attributes the time inside its block to a stage."""
        return StageTimer(self, name)

    def switch(self, name: str) -> str:
        """Be in a stage from now on; the stage until now."""
        now = time.perf_counter_ns()
        self._spent[self._stage] += now - self._mark_ns
        self._mark_ns = now
        left, self._stage = self._stage, name
        return left

    def elapsed_ns(self) -> int:
        """Wall time since the clock was made."""
        return time.perf_counter_ns() - self._start_ns

    def spent_ns(self, name: str) -> int:
        """Time attributed to a stage so far."""
        self.switch(self._stage)
        return self._spent[name]


class StageTimer:
    """Time inside the block, for a clock. See `StageClock.stage`."""

    __slots__ = ("_clock", "_name", "_outer")

    def __init__(self, clock: StageClock, name: str) -> None:
        self._clock = clock
        self._name = name
        self._outer = name

    def __enter__(self) -> None:
        self._outer = self._clock.switch(self._name)

    def __exit__(self, *error: object) -> None:
        self._clock.switch(self._outer)

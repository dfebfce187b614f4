"""Where time goes: the only list of stages, a step's times in a service, and a request's clock."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

# What a text waits for in the orchestrator: disjoint parts of its wall time; `own` is the rest.
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

# The stages of a step in a service, in order; a draft alternates between forward and numbers.
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
# The stages whose times a reply contains.
ENGINE_STAGES = (QUEUE, GATHER, FORWARD, NUMBERS)
_FIELDS = {stage: f"{stage}_ns" for stage in ENGINE_STAGES}
# Names of the stage `numbers` by step.
_NUMBERS = {"draft": "draw", "verify": "accept", "prefill": "accept"}


# Times of the services in a text's summary, besides the waits: of its prefills and its rounds.
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
    """Name of a stage of a step in `BUSY`: "draft_forward"."""
    return f"{step}_{name_of(step, stage)}"


def name_of(step: str, stage: str) -> str:
    """Name of a stage in a step: `numbers` is "draw" in a draft, and "accept" elsewhere."""
    return _NUMBERS[step] if stage == NUMBERS else stage


@dataclass(slots=True)
class StageTimes:
    """Stage times of one step in one service, nanoseconds of its monotonic clock.

    Attributes:
        queue_ns: from the checked message until the engine has time for it.
        gather_ns: while the engine waited for other sequences to share the pass.
        forward_ns: in passes; on an asynchronous device, the device's own time.
        numbers_ns: from the end of passes to their results on the host.
        batch_size: sequences that shared the last pass.
        stamps: if the step is traced, each part with its beginning and end by
            time.perf_counter_ns(); else None.
    """

    queue_ns: int = 0
    gather_ns: int = 0
    forward_ns: int = 0
    numbers_ns: int = 0
    batch_size: int = 1
    stamps: list[tuple[str, int, int]] | None = field(default=None, compare=False)

    def of(self, stage: str) -> int:
        """Nanoseconds of one of `ENGINE_STAGES`."""
        nanoseconds: int = getattr(self, _FIELDS[stage])
        return nanoseconds

    @property
    def total_ns(self) -> int:
        """All of them together."""
        return self.queue_ns + self.gather_ns + self.forward_ns + self.numbers_ns

    def waited(self, since_ns: int, gathering_ns: int, until_ns: int) -> None:
        """Record a wait for a pass; its last part, from `gathering_ns`, was for other sequences."""
        gathering_ns = min(max(since_ns, gathering_ns), until_ns)
        self.queue_ns += gathering_ns - since_ns
        self.gather_ns += until_ns - gathering_ns
        self._stamp(QUEUE, since_ns, gathering_ns)
        self._stamp(GATHER, gathering_ns, until_ns)

    def computed(self, start_ns: int, passed_ns: int, end_ns: int) -> None:
        """Record a pass, and the computation of its results."""
        self.forward_ns += passed_ns - start_ns
        self.numbers_ns += end_ns - passed_ns
        self._stamp(FORWARD, start_ns, passed_ns)
        self._stamp(NUMBERS, passed_ns, end_ns)

    def _stamp(self, stage: str, start_ns: int, end_ns: int) -> None:
        if self.stamps is not None:
            self.stamps.append((stage, start_ns, end_ns))


class StageClock:
    """Attributes every nanosecond of a request's wall time to exactly one of `WAITS`.

    Time outside named stages is `own`. Inside a nested stage only the inner one counts.
    """

    def __init__(self) -> None:
        self._start_ns = self._mark_ns = time.perf_counter_ns()
        self._stage = "own"
        self._spent: dict[str, int] = dict.fromkeys(WAITS, 0)

    def stage(self, name: str) -> StageTimer:
        """A context manager that attributes the time inside its block to a stage."""
        return StageTimer(self, name)

    def switch(self, name: str) -> str:
        """Enter a stage now; return the stage that this ends."""
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
    """Attributes the time inside its block to a stage. See `StageClock.stage`."""

    __slots__ = ("_clock", "_name", "_outer")

    def __init__(self, clock: StageClock, name: str) -> None:
        self._clock = clock
        self._name = name
        self._outer = name

    def __enter__(self) -> None:
        self._outer = self._clock.switch(self._name)

    def __exit__(self, *error: object) -> None:
        self._clock.switch(self._outer)

"""How long steps waited for a batch, and how many sequences the engines' passes served."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.tools.traces.read.request import TracedRequest
from tandem.tools.traces.read.spans import Process, RecordedSpan

# A step counts as having waited if its time before its first pass exceeds this share of the time of
# its passes. To wake an idle engine for a step takes 5 to 10 % of the smallest models' passes.
WAITED = 0.25


@dataclass
class PassWaits:
    """Steps of one kind and one batch size; times are totals.

    Attributes:
        steps: number of steps.
        waited: steps that waited longer than `WAITED` allows.
        queue_ns: until the engine selected them.
        gather_ns: from there to their first pass.
        forward_ns: in passes.
    """

    steps: int = 0
    waited: int = 0
    queue_ns: int = 0
    gather_ns: int = 0
    forward_ns: int = 0

    def add(self, request: TracedRequest, step: RecordedSpan) -> None:
        """Count a step."""
        spent = {"queue": 0, "gather": 0, "forward": 0}
        for child in request.children(step):
            part = child.name.removeprefix(f"{step.name}.")
            if part in spent:
                spent[part] += child.duration_ns
        self.steps += 1
        self.queue_ns += spent["queue"]
        self.gather_ns += spent["gather"]
        self.forward_ns += spent["forward"]
        self.waited += spent["queue"] + spent["gather"] > WAITED * spent["forward"]


def batch_size(request: TracedRequest, step: RecordedSpan) -> int:
    """Sequences that shared a step's passes: by its own attribute, else its passes'; else 0."""
    said = step.number("tandem.batch_size")
    if said is None:
        passes = [child.number("tandem.batch_size") or 0 for child in request.children(step)]
        said = max(passes, default=0)
    return max(said, 0)


@dataclass
class Passes:
    """An engine's passes.

    Attributes:
        count: number of passes.
        sequences: sequences that they served, in total.
        busy_ns: their total time.
        first_ns: start of the first pass.
        last_ns: end of the last pass.
    """

    count: int = 0
    sequences: int = 0
    busy_ns: int = 0
    first_ns: int = 0
    last_ns: int = 0

    def add(self, span: RecordedSpan) -> None:
        """Count a pass."""
        self.first_ns = min(self.first_ns, span.start_ns) if self.count else span.start_ns
        self.last_ns = max(self.last_ns, span.end_ns)
        self.count += 1
        self.sequences += span.number("tandem.batch_size") or max(len(span.links), 1)
        self.busy_ns += span.duration_ns

    @property
    def busy(self) -> float:
        """Share of the time from the first pass to the last that was spent in passes."""
        lasted = self.last_ns - self.first_ns
        return min(self.busy_ns / lasted, 1.0) if lasted else 0.0

    @property
    def mean_sequences(self) -> float:
        """Mean sequences per pass."""
        return self.sequences / self.count if self.count else 0.0


@dataclass
class Batches:
    """Waits by kind of step and batch size, and passes by engine."""

    waits: dict[tuple[str, int], PassWaits] = field(default_factory=dict)
    passes: dict[Process, Passes] = field(default_factory=dict)

    def add_rounds(self, request: TracedRequest) -> None:
        """Count the steps of a request's rounds."""
        for round_ in request.rounds():
            for step in (round_.draft, round_.verify):
                if step is not None:
                    key = step.name, batch_size(request, step)
                    self.waits.setdefault(key, PassWaits()).add(request, step)

    def add_pass(self, span: RecordedSpan) -> None:
        """Count a pass."""
        self.passes.setdefault(span.process, Passes()).add(span)

"""Where steps waited for a batch, and what engines' passes held."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.tools.traces.read.request import TracedRequest
from tandem.tools.traces.read.spans import Process, RecordedSpan

# A step has waited if it spent more than this part of its own passes' time before the first of
# them: handing it to an idle engine and waking it costs 5 to 10 % of the smallest models' passes.
WAITED = 0.25


@dataclass
class PassWaits:
    """Steps of one kind that shared their pass with as many others.

    Attributes:
        steps: how many.
        waited: of them, longer than `WAITED` of their passes.
        queue_ns: until the engine looked at them, in all.
        gather_ns: from there to their first pass, in all.
        forward_ns: in passes, in all.
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
    """Sequences that shared a step's passes: as it says, or as its passes do; 0 if unknown."""
    said = step.number("tandem.batch_size")
    if said is None:
        passes = [child.number("tandem.batch_size") or 0 for child in request.children(step)]
        said = max(passes, default=0)
    return max(said, 0)


@dataclass
class Passes:
    """An engine's passes.

    Attributes:
        count: how many.
        sequences: that they served, in all.
        busy_ns: their time, in all.
        first_ns: start of the first.
        last_ns: end of the last.
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
        """Share of the time between the first and the last."""
        lasted = self.last_ns - self.first_ns
        return min(self.busy_ns / lasted, 1.0) if lasted else 0.0

    @property
    def mean_sequences(self) -> float:
        """Sequences a pass."""
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

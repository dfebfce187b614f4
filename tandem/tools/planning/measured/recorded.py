"""A measurement from recorded traces."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from tandem.failure import Failure
from tandem.tools.planning.measured.measurement import MeasuredText, Measurement
from tandem.tools.traces.analysis.acceptance import RecordedAcceptance
from tandem.tools.traces.analysis.batches import batch_size
from tandem.tools.traces.prediction.basis import LONGEST
from tandem.tools.traces.prediction.costs import Curve
from tandem.tools.traces.prediction.speculation import continued, kept
from tandem.tools.traces.read.recording import Recording
from tandem.tools.traces.read.request import TracedRequest, TracedRound
from tandem.tools.traces.read.spans import RecordedKind, RecordedSpan

_NS = 1e9
_FORWARD = ".forward"
# Stages of a step during which its engine is busy.
_WORK = (_FORWARD, ".draw", ".accept")
_WAITS = (".queue", ".gather")
# The orchestrator's own spans of a text, outside rounds.
_OWN = ("tokenize", "detokenize")


@dataclass
class _Times:
    """Total times of steps by batch size, nanoseconds."""

    spent: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    steps: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, size: int, spent: float, steps: int = 1) -> None:
        if size > 0:
            self.spent[size] += spent
            self.steps[size] += steps

    def curve(self) -> Curve:
        means = {float(size): self.spent[size] / self.steps[size] / _NS for size in self.steps}
        return Curve(means, {float(size): count for size, count in self.steps.items()})


class Recorded:
    """Adds up the requests of a recording, one by one."""

    def __init__(self) -> None:
        self._verify, self._draft = _Times(), _Times()
        self._acceptance = RecordedAcceptance()
        self._texts: list[MeasuredText] = []
        self._beside_ns = self._opening_ns = self._text_ns = self._round_ns = 0.0
        self._rounds = 0

    def add(self, request: TracedRequest) -> None:
        """Count a request that ended well."""
        for round_ in request.rounds():
            if round_.draft is not None and round_.verify is not None and round_.gamma:
                self._add_round(request, round_, round_.draft, round_.verify)
        children = request.children(request.root)
        opening = next((span for span in children if span.name == "open"), None)
        target = opening and request.server_side(opening, "prefill")
        drafter = request.server_side(request.root, "prefill")
        first = request.first_token_ns
        work = _sum(request, target, _WORK)
        passes = max(_passes(request, target), 1)
        drafting = _sum(request, drafter, _WORK)
        self._texts.append(MeasuredText(max(request.tokens, 1), work / _NS, drafting / _NS, passes))
        if first is not None:
            self._opening_ns += max(first - work - _sum(request, target, _WAITS), 0.0)
        self._text_ns += sum(span.duration_ns for span in children if span.name in _OWN)

    def _add_round(
        self, request: TracedRequest, round_: TracedRound, draft: RecordedSpan, verify: RecordedSpan
    ) -> None:
        drafting, verifying = (_sum(request, step, _WORK) for step in (draft, verify))
        self._draft.add(batch_size(request, draft), drafting, max(_passes(request, draft), 1))
        self._verify.add(batch_size(request, verify), verifying)
        waits = sum(_sum(request, step, _WAITS) for step in (draft, verify))
        self._beside_ns += max(round_.span.duration_ns - drafting - verifying - waits, 0.0)
        calls = [c for c in request.children(round_.span) if c.kind == RecordedKind.CLIENT]
        self._round_ns += max(round_.span.duration_ns - sum(c.duration_ns for c in calls), 0.0)
        self._acceptance.add(round_)
        self._rounds += 1

    def measurement(self) -> Measurement:
        """The measurement from all requests.

        Raises:
            Failure: too little was recorded.
        """
        counts = self._acceptance
        if not self._rounds or not self._verify.steps or not self._draft.steps:
            raise Failure("no round with a draft and its verification was recorded")
        sizes = max(self._verify.steps)
        notes = [
            f"batches of up to {sizes} texts were recorded; larger ones lie on a line through them",
            "a draft's time is proportional to its length, a verification's does not depend on it",
        ]
        longest = max(LONGEST, counts.longest)
        return Measurement(
            gamma=counts.commonest_gamma,
            verify=self._verify.curve(),
            draft=self._draft.curve(),
            shares=kept(continued(counts.onward, counts.reached, longest)),
            texts=self._texts,
            opening_s=self._opening_ns / len(self._texts) / _NS,
            round_s=self._beside_ns / self._rounds / _NS,
            orchestrator_text_s=self._text_ns / len(self._texts) / _NS,
            orchestrator_round_s=self._round_ns / self._rounds / _NS,
            notes=notes,
        )


def _sum(request: TracedRequest, step: RecordedSpan | None, parts: tuple[str, ...]) -> float:
    """Time of some stages of a step, nanoseconds."""
    if step is None:
        return 0.0
    children = request.children(step)
    return float(sum(child.duration_ns for child in children if child.name.endswith(parts)))


def _passes(request: TracedRequest, step: RecordedSpan | None) -> int:
    """Forward passes of a step."""
    children = request.children(step) if step else ()
    return sum(1 for child in children if child.name.endswith(_FORWARD))


def measured_from(recording: Recording) -> Measurement:
    """A measurement from a recording's requests that ended well.

    Raises:
        Failure: too little was recorded.
    """
    found = Recorded()
    for request in recording.finished():
        found.add(request)
    return found.measurement()

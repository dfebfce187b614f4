"""Where the time of all requests went."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field

from tandem.tools.traces.analysis.acceptance import RecordedAcceptance
from tandem.tools.traces.analysis.ahead import RecordedAhead
from tandem.tools.traces.analysis.attribution import segments, unit_of
from tandem.tools.traces.analysis.batches import Batches
from tandem.tools.traces.analysis.figures import RequestFigures
from tandem.tools.traces.analysis.quantiles import Quantiles
from tandem.tools.traces.analysis.stages import STAGES, OwnedStage
from tandem.tools.traces.read.clocks import Skew
from tandem.tools.traces.read.recording import Recording
from tandem.tools.traces.read.request import TracedRequest

_SLOWEST = 10


@dataclass
class TraceReport:
    """Figures of all requests that ended well, in memory that does not grow with their number.

    Attributes:
        stages: the time that a step, call, round or request spent in each stage on the critical
            path of its request; work in parallel to that path is not counted.
        wall: wall time of requests.
        first_token: from the call to the first token.
        tokens: emitted tokens.
        rounds: decided rounds, without the prefills.
        prompt_tokens: of all prompts.
        cached_tokens: of these, that targets had computed before.
        drafter_cached_tokens: that drafters had.
        acceptance: by verifier.
        ahead: what became of prepared drafts.
        batches: how long steps waited for a batch, and the engines' passes.
        slowest: the requests with the longest wall time, the slowest first.
        skews: of the clocks.
        left_out: a sentence for each kind of thing that no figure includes.
    """

    stages: dict[OwnedStage, Quantiles] = field(default_factory=dict)
    wall: Quantiles = field(default_factory=Quantiles)
    first_token: Quantiles = field(default_factory=Quantiles)
    tokens: int = 0
    rounds: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    drafter_cached_tokens: int = 0
    acceptance: dict[str, RecordedAcceptance] = field(default_factory=dict)
    ahead: RecordedAhead = field(default_factory=RecordedAhead)
    batches: Batches = field(default_factory=Batches)
    slowest: list[RequestFigures] = field(default_factory=list)
    skews: list[Skew] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, recording: Recording) -> TraceReport:
        """Go through a recording.

        Raises:
            Failure: no request ended well.
        """
        report = cls(skews=recording.skews)
        keep = _Slowest()
        for request in recording.finished(report.batches.add_pass):
            keep.add(report._add(request))
        report.slowest = keep.all()
        report.stages = {s: report.stages[s] for s in STAGES if s in report.stages}
        report.left_out = recording.left_out.sentences()
        return report

    def _add(self, request: TracedRequest) -> RequestFigures:
        path = segments(request)
        samples: Counter[tuple[str, OwnedStage]] = Counter()
        for segment in path:
            samples[unit_of(segment), segment.stage] += segment.duration_ns
        for (_, stage), spent in samples.items():
            self.stages.setdefault(stage, Quantiles()).add(spent)
        figures = RequestFigures.of(request, path)
        self.wall.add(figures.wall_ns)
        if figures.first_token_ns is not None:
            self.first_token.add(figures.first_token_ns)
        self.tokens += figures.tokens
        self.rounds += figures.rounds
        self.prompt_tokens += request.prompt_tokens
        by_target, by_drafter = request.cached_tokens
        self.cached_tokens += by_target
        self.drafter_cached_tokens += by_drafter
        for round_ in request.rounds():
            if round_.gamma:
                self.acceptance.setdefault(round_.verifier, RecordedAcceptance()).add(round_)
        self.ahead.add(request, path)
        self.batches.add_rounds(request)
        return figures

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of a request: all tokens over the sum of wall times."""
        return self.tokens / self.wall.total_ns * 1e9 if self.wall.total_ns else 0.0

    def share(self, stage: OwnedStage) -> float:
        """Of all requests' wall time. The shares of all stages add up to 1."""
        spent = self.stages[stage].total_ns
        return spent / self.wall.total_ns if self.wall.total_ns else 0.0


class _Slowest:
    """Keeps the slowest of any number of requests."""

    def __init__(self) -> None:
        self._kept: list[tuple[int, str, int, RequestFigures]] = []
        self._count = 0

    def add(self, figures: RequestFigures) -> None:
        self._count += 1  # two requests may be alike in all else, and figures have no order
        entry = (figures.wall_ns, figures.request_id, self._count, figures)
        push = heapq.heappush if len(self._kept) < _SLOWEST else heapq.heappushpop
        push(self._kept, entry)

    def all(self) -> list[RequestFigures]:
        return [figures for *_, figures in sorted(self._kept, reverse=True)]

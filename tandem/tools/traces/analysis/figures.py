"""One request in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.tools.traces.analysis.attribution import OwnedInterval
from tandem.tools.traces.analysis.stages import OwnedStage
from tandem.tools.traces.read.request import TracedRequest


@dataclass(frozen=True, slots=True)
class RequestFigures:
    """A request.

    Attributes:
        request_id: as the client or the orchestrator named it.
        trace_id: of its spans.
        started_ns: since the epoch.
        wall_ns: from the call to its end.
        first_token_ns: from the call to its first token; None if not recorded.
        tokens: emitted tokens.
        rounds: decided rounds, without the prefill.
        drafted: drafted tokens.
        accepted: accepted tokens.
        stages: wall time by stage; adds up to `wall_ns`.
    """

    request_id: str
    trace_id: str
    started_ns: int
    wall_ns: int
    first_token_ns: int | None
    tokens: int
    rounds: int
    drafted: int
    accepted: int
    stages: dict[OwnedStage, int]

    @classmethod
    def of(cls, request: TracedRequest, path: Sequence[OwnedInterval]) -> RequestFigures:
        """The figures of a request, from the segments of its wall time."""
        stages: Counter[OwnedStage] = Counter()
        for segment in path:
            stages[segment.stage] += segment.duration_ns
        rounds = list(request.rounds())
        return cls(
            request_id=request.id,
            trace_id=request.root.trace_id,
            started_ns=request.root.start_ns,
            wall_ns=request.wall_ns,
            first_token_ns=request.first_token_ns,
            tokens=request.tokens,
            rounds=len(rounds),
            drafted=sum(round_.gamma for round_ in rounds),
            accepted=sum(round_.accepted for round_ in rounds),
            stages=dict(stages),
        )

    @property
    def tokens_per_s(self) -> float:
        """Of this request alone."""
        return self.tokens / self.wall_ns * 1e9 if self.wall_ns else 0.0

    @property
    def longest_stage(self) -> tuple[OwnedStage, float] | None:
        """The stage with most of its time, and its share; None if the request took no time."""
        if not self.wall_ns:
            return None
        stage = max(self.stages, key=self.stages.__getitem__)
        return stage, self.stages[stage] / self.wall_ns

"""What became of drafts that were prepared while a target verified, and what they saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tandem.tools.traces.analysis.attribution import OwnedInterval
from tandem.tools.traces.read.request import TracedRequest

HIT, LATE, MISS = "hit", "late", "miss"
_ELSE = ""  # rounds with a draft for which nothing had been prepared


class RecordedAhead:
    """Counts rounds after which drafts had been prepared.

    Attributes:
        rounds: by what became of them: "hit", "late" or "miss"; the others under "".
        drafts: that had been prepared in all, finished or not.
        waited_ns: on requests' critical paths, for drafts of such rounds, likewise.
    """

    def __init__(self) -> None:
        self.rounds: Counter[str] = Counter()
        self.drafts = 0
        self.waited_ns: Counter[str] = Counter()

    def add(self, request: TracedRequest, path: Sequence[OwnedInterval]) -> None:
        """Count a request's rounds.

        Args:
            request: with its spans.
            path: its segments.
        """
        segments = [each for each in path if each.stage.name.startswith("draft.")]
        place = 0
        for round_ in request.rounds():
            spent, start, end = 0, round_.span.start_ns, round_.span.end_ns
            while place < len(segments) and segments[place].start_ns < end:
                spent += segments[place].duration_ns * (segments[place].start_ns >= start)
                place += 1
            if round_.gamma and round_.prepared in (HIT, LATE, MISS, _ELSE):
                self.rounds[round_.prepared] += 1
                self.drafts += round_.prepared_drafts
                self.waited_ns[round_.prepared] += spent

    @property
    def total(self) -> int:
        """Rounds for which drafts had been prepared."""
        return self.rounds.total() - self.rounds[_ELSE]

    def share(self, outcome: str) -> float:
        """Of those rounds; 0 without any."""
        return self.rounds[outcome] / self.total if self.total else 0.0

    def mean_ns(self, outcome: str) -> float:
        """A round's wait for its draft; 0 without any."""
        return self.waited_ns[outcome] / self.rounds[outcome] if self.rounds[outcome] else 0.0

    @property
    def hidden_ns(self) -> float:
        """Time that was not waited, in all: as if each round had waited as one whose draft was not
        prepared."""
        whole_ns = self.mean_ns(MISS if self.rounds[MISS] else _ELSE)
        saved = sum(self.rounds[one] * (whole_ns - self.mean_ns(one)) for one in (HIT, LATE))
        return max(saved, 0.0)

    @property
    def thrown_away(self) -> float:
        """Share of the prepared drafts that were of no use; 0 without any."""
        used = self.rounds[HIT] + self.rounds[LATE]
        return 1 - used / self.drafts if self.drafts else 0.0

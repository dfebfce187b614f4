"""The basis of predictions: requests that drafted, grouped by how they were decoded."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem.failure import Failure
from tandem.tools.traces.analysis.acceptance import RecordedAcceptance
from tandem.tools.traces.analysis.attribution import segments
from tandem.tools.traces.analysis.batches import Batches
from tandem.tools.traces.analysis.stages import INSIDE, OwnedStage
from tandem.tools.traces.prediction.costs import Costs, GammaCosts, costs_by_gamma
from tandem.tools.traces.prediction.speculation import continued, kept
from tandem.tools.traces.read.recording import Recording
from tandem.tools.traces.read.request import TracedRequest

LONGEST = 16
# With fewer rounds of another rule, the model predicts its acceptance better than they do.
_MIN_ROUNDS = 200


class Decoding(NamedTuple):
    """How a request was decoded; figures of different decodings are not mixed."""

    verifier: str
    gamma: int
    greedy: bool

    def __str__(self) -> str:
        return f"{self.verifier}, gamma {self.gamma}, temperature {'0' if self.greedy else '> 0'}"


@dataclass
class Group:
    """Requests of one decoding.

    Attributes:
        requests: number of requests.
        tokens: emitted tokens, in total.
        wall_ns: wall time, in total.
        stages: wall time by stage.
        rounds: number and times of their rounds.
        inside: whether targets made any of their drafts.
        ahead: whether any were prepared while targets verified.
    """

    requests: int = 0
    tokens: int = 0
    wall_ns: int = 0
    stages: Counter[OwnedStage] = field(default_factory=Counter)
    rounds: Costs = field(default_factory=Costs)
    inside: bool = False
    ahead: bool = False


class Basis:
    """All requests of a recording that drafted.

    Attributes:
        way: the decoding of most rounds.
        group: the requests of that decoding.
        batches: of all requests.

    Args:
        recording: to predict from.
        verifier: use only requests with this rule, if given.
        gamma: use only requests with this draft length, if given.

    Raises:
        Failure: no request ended well, or none of them has such drafts.
    """

    def __init__(self, recording: Recording, verifier: str | None, gamma: int | None) -> None:
        self._groups: dict[Decoding, Group] = {}
        self._acceptance: dict[tuple[str, bool], RecordedAcceptance] = {}
        self._by_gamma: dict[int, Costs] = {}
        self.batches = Batches()
        for request in recording.finished(self.batches.add_pass):
            self._add(request)
        wanted = {
            way: group
            for way, group in self._groups.items()
            if verifier in (None, way.verifier) and gamma in (None, way.gamma)
        }
        if not wanted:
            seen = tuple(f"recorded: {way}" for way in self._groups)
            raise Failure("no request with drafts of that kind was recorded", seen)
        self.way = max(wanted, key=lambda way: (wanted[way].rounds.rounds, way))
        self.group = wanted[self.way]

    def _add(self, request: TracedRequest) -> None:
        rounds = list(request.rounds())
        drafted = [round_ for round_ in rounds if round_.gamma]
        if not drafted:
            return
        asked = request.root.number("tandem.gamma")
        gamma = asked or Counter(r.gamma for r in drafted).most_common(1)[0][0]
        greedy = request.root.attributes.get("gen_ai.request.temperature") in (0, 0.0)
        verifier = drafted[0].verifier
        group = self._groups.setdefault(Decoding(verifier, gamma, greedy), Group())
        group.inside |= any(
            round_.draft is not None and bool(round_.draft.attributes.get(INSIDE))
            for round_ in drafted
        )
        group.ahead |= any(round_.prepared for round_ in drafted)
        group.requests += 1
        group.tokens += request.tokens
        group.wall_ns += request.wall_ns
        path = segments(request)
        for segment in path:
            group.stages[segment.stage] += segment.duration_ns
        for each, costs in costs_by_gamma(request, path).items():
            self._by_gamma.setdefault(each, Costs()).add(costs)
            group.rounds.add(costs)
        counts = self._acceptance.setdefault((verifier, greedy), RecordedAcceptance())
        for round_ in drafted:
            counts.add(round_)
        self.batches.add_rounds(request)

    def costs(self) -> GammaCosts:
        """The time of a round at any draft length."""
        base = self.way.gamma
        if base not in self._by_gamma:  # the orchestrator shortened all drafts
            base = max(self._by_gamma, key=lambda gamma: self._by_gamma[gamma].rounds)
        return GammaCosts(self._by_gamma, base)

    def recorded_shares(self, verifier: str) -> list[float] | None:
        """Shares of drafts kept up to each place; None if too little is recorded of the rule.

        Has one place more than the longest predicted draft: drafting ahead guesses that token.
        """
        counts = self._acceptance.get((verifier, self.way.greedy))
        if counts is None or (verifier != self.way.verifier and counts.rounds < _MIN_ROUNDS):
            return None
        return kept(continued(counts.onward, counts.reached, max(LONGEST, self.way.gamma) + 1))

    def longest_recorded(self) -> int:
        """The longest draft whose acceptance was recorded."""
        return self._acceptance[self.way.verifier, self.way.greedy].longest

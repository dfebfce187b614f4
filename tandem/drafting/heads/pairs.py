"""Trees by a head that reads pairs of a feature and the token after it, level by level."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from tandem.drafting.decoders.growth import Growth
from tandem.drafting.decoders.model import StopKey, ThresholdKey
from tandem.drafting.decoders.shape import drawn_numbers
from tandem.drafting.drafter import DraftSequence, Setting
from tandem.drafting.heads.head import AcceptanceByDepth, HeadDrafter, OfHead
from tandem.drafting.stop import FIXED, THRESHOLD, Stop
from tandem.engine.answers import DrawnTree
from tandem.engine.asks import ReadTokens, Steps, ToHost, Truncation
from tandem.engine.scorer import Scorer
from tandem.inference.feed import DrawnToken, Feed
from tandem.speculation.draft import Draft


@dataclass(eq=False)
class _Grown(Growth):
    """With what a head computed.

    Attributes:
        rows: branch row of each place that was computed; the root is 0.
    """

    rows: dict[int, int] = field(default_factory=lambda: {0: 0})


class PairsDrafter(HeadDrafter):
    """Draws siblings without replacement after each place that it computes.

    After true pairs it goes on with drawn tokens, whose places leave its cache at the next draft.

    Attributes:
        confident: whether what is drawn next follows from the probabilities of what was drawn so
            far (EAGLE-2, arXiv 2406.16858). What is drawn is sent.
        stop: after which tokens nothing is drawn.
    """

    confident = False
    stop = FIXED

    def draft(self, sequence: DraftSequence, round_: int, gamma: int, budget: int) -> Steps[Draft]:
        """Level by level, after true pairs."""
        feed: Feed | None = self._news(sequence, 1)
        if feed is None:
            return Draft.certain(())
        shape = self._shape(gamma, budget)
        # Tokens that are not drawn have no probabilities.
        confident = self.confident and not (self._certain or sequence.sampling.greedy)
        depths = len(shape.levels)
        grown = _Grown(len(shape))
        counts = dict(shape.counts(0))
        reached = {0: 1.0}
        # Places that more is drawn after, by their number in the shape's level.
        behind = {0: 0}
        for depth in range(depths):
            first = len(grown.drawn)
            numbers = drawn_numbers(shape.counts(depth), behind)
            each = list(counts.values())
            shaped = yield from grown.shaped(sequence, list(counts))
            drawn = yield self._draw(sequence, feed, round_, first, grown.most, each, shaped=shaped)
            grown.add(drawn, list(counts), each)
            if depth + 1 == depths:
                break
            strong = yield from self._strong(sequence, drawn, first)
            if confident:
                reached = yield from self._reach(grown, first, reached)
                reached = {place: reach for place, reach in reached.items() if place in strong}
                size = len(shape.levels[depth + 1])
                counts = _worthiest(reached, self._acceptance[depth + 1], size)
            else:
                at = {number: first + 1 + i for i, number in enumerate(numbers)}
                behind = {number: place for number, place in at.items() if place in strong}
                inner = shape.counts(depth + 1)
                counts = {behind[node]: n for node, n in inner.items() if node in behind}
            if not counts:
                break
            feed = self._behind(sequence, grown, list(counts))
        tree: DrawnTree = yield ToHost(grown.drawn, grown.places, distinct=True)
        if sequence.threshold is not None:
            sequence.threshold.drafted, sequence.threshold.asked = tree.draft.depth, depths
        return tree.draft

    def open(self, sequence: DraftSequence) -> Steps[None]:
        """The prompt's features come later."""
        yield from super().open(sequence)
        if self.stop.early:
            sequence.threshold = self.stop.begin()

    def observe(self, sequence: DraftSequence, emitted: Sequence[int]) -> None:
        """See `Drafter`; a threshold learns from what was kept."""
        if sequence.threshold is not None:
            sequence.threshold.learn(len(emitted) - 1)
        super().observe(sequence, emitted)

    def _strong(
        self, sequence: DraftSequence, drawn: Sequence[DrawnToken], first: int
    ) -> Steps[set[int]]:
        """The places of the level just drawn that more may be drawn after."""
        places = range(first + 1, first + 1 + len(drawn))
        if sequence.threshold is None:
            return set(places)
        shares: Sequence[float] = yield ReadTokens(drawn, shares=True)
        threshold = sequence.threshold.value
        return {place for place, share in zip(places, shares, strict=True) if share >= threshold}

    def _behind(self, sequence: DraftSequence, grown: _Grown, behind: Sequence[int]) -> Feed:
        """Drawn nodes, to be computed after the places that they hang at."""
        parents = [grown.rows[grown.places[place - 1]] for place in behind]
        count = len(grown.rows)
        grown.rows |= {place: count + i for i, place in enumerate(behind)}
        (cache,) = sequence.caches
        return Feed(cache, [grown.drawn[place - 1] for place in behind], len(behind), parents)

    def _reach(
        self, grown: _Grown, first: int, reached: dict[int, float]
    ) -> Steps[dict[int, float]]:
        """The probability that the head gives the path to each place of the level just drawn."""
        shares = yield ReadTokens(grown.drawn[first:], shares=True)
        return {
            first + 1 + i: reached[grown.places[first + i]] * share
            for i, share in enumerate(shares)
        }


def _worthiest(reached: dict[int, float], acceptance: Sequence[float], size: int) -> dict[int, int]:
    """How many children each place gets: the likeliest of a level have them."""
    waiting = [(-reach * acceptance[0], place, 0) for place, reach in reached.items()]
    heapq.heapify(waiting)
    counts: dict[int, int] = {}
    for _ in range(size):
        if not waiting:
            break
        _, place, rank = heapq.heappop(waiting)
        counts[place] = rank + 1
        if rank + 1 < len(acceptance):
            heapq.heappush(waiting, (-reached[place] * acceptance[rank + 1], place, rank + 1))
    return dict(sorted(counts.items()))


class OfPairs(OfHead):
    """A recipe with a head that reads pairs.

    Attributes:
        grow: "static" has one shape for each size; "confidence" chooses what is expanded by what
            was drawn (EAGLE-2).
    """

    unmeasured: ClassVar[AcceptanceByDepth] = ((0.6, 0.1, 0.05), (0.55, 0.1, 0.05))

    grow: Annotated[
        Literal["static", "confidence"],
        Setting(
            "grow",
            "what determines a draft's shape: static (its size alone) or confidence"
            " (what was drawn)",
        ),
    ] = "static"
    stop: StopKey = "fixed"
    threshold: ThresholdKey = THRESHOLD

    def make(self, scorers: Sequence[Scorer], truncation: Truncation) -> HeadDrafter:
        """See `Recipe`."""
        drafter = super().make(scorers, truncation)
        assert isinstance(drafter, PairsDrafter)
        drafter.confident = self.grow == "confidence"
        drafter.stop = Stop(self.stop, self.threshold)
        return drafter

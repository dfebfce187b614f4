"""Which stage owns which instant of a request's wall time.

The tree of spans is swept from the root. Of a span's children at an instant, the request waits for
the one that ends last, and the deepest span on that path owns the instant. The drafter's prefill is
an exception: it runs in the background, and counts only while a round waits for nothing else.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

from tandem.tools.traces.analysis.stages import (
    CALL,
    DRAFTER,
    HOLDERS,
    INSIDE,
    LEAVES,
    ORCHESTRATOR,
    OWN,
    PART_NAMES,
    ROUND,
    STEP_PARTS,
    TARGET,
    OwnedStage,
)
from tandem.tools.traces.read.request import TracedRequest
from tandem.tools.traces.read.spans import RecordedSpan

# The drafter's prefill: directly below `generate`, with or without a client span around it.
_BACKGROUND = frozenset({"prefill", "call.prefill"})


class OwnedInterval(NamedTuple):
    """A stretch of a request's wall time.

    Attributes:
        start_ns: inclusive.
        end_ns: exclusive; the next segment's start.
        span: that owns it.
        stage: that it counts for.
    """

    start_ns: int
    end_ns: int
    span: RecordedSpan
    stage: OwnedStage

    @property
    def duration_ns(self) -> int:
        """Never negative."""
        return self.end_ns - self.start_ns


class _Piece(NamedTuple):
    """A stretch during which the request waits for one of several spans, or for none."""

    start_ns: int
    end_ns: int
    chosen: RecordedSpan | None


def segments(request: TracedRequest) -> list[OwnedInterval]:
    """A request's wall time from start to end, without a gap or an overlap."""
    sweep = _Sweep(request)
    root = request.root
    sweep.span(root, root, root.start_ns, root.end_ns)
    return sweep.found


def unit_of(segment: OwnedInterval) -> str:
    """Id of the span whose share of the segment's stage is one sample: a step, call or round."""
    span = segment.span
    return span.parent_id if span.name in PART_NAMES else span.span_id


class _Sweep:
    def __init__(self, request: TracedRequest) -> None:
        self.found: list[OwnedInterval] = []
        self._request = request
        children = request.children(request.root)
        self._beside = [child for child in children if child.name in _BACKGROUND]
        self._awaited = [child for child in children if child.name not in _BACKGROUND]

    def span(self, span: RecordedSpan, owner: RecordedSpan, start: int, end: int) -> None:
        """Attribute a stretch of a span's time.

        Args:
            span: on the critical path.
            owner: `span`, or the nearest span above it with a known name.
            start: of the stretch, nanoseconds.
            end: of the stretch.
        """
        request = self._request
        children = self._awaited if span is request.root else request.children(span)
        waits = owner.name == ROUND and owner.parent_id == request.root.span_id
        for piece in _pieces(children, start, end):
            if piece.chosen is not None:
                below = piece.chosen if _is_known(piece.chosen) else owner
                self.span(piece.chosen, below, piece.start_ns, piece.end_ns)
            elif waits:
                self._gap(owner, piece)
            else:
                self._add(owner, piece.start_ns, piece.end_ns)

    def _gap(self, owner: RecordedSpan, gap: _Piece) -> None:
        """Attribute a stretch of a round without a call."""
        for piece in _pieces(self._beside, gap.start_ns, gap.end_ns):
            if piece.chosen is None:
                self._add(owner, piece.start_ns, piece.end_ns)
            else:
                self.span(piece.chosen, piece.chosen, piece.start_ns, piece.end_ns)

    def _add(self, span: RecordedSpan, start: int, end: int) -> None:
        last = self.found[-1] if self.found else None
        if last is not None and last.span is span:
            self.found[-1] = last._replace(end_ns=end)
        else:
            self.found.append(OwnedInterval(start, end, span, _stage_of(self._request, span)))


def _pieces(spans: list[RecordedSpan], start: int, end: int) -> Iterator[_Piece]:
    """Cut a stretch at the points where the request begins to wait for another span.

    Args:
        spans: sorted by their starts.
        start: of the stretch, nanoseconds.
        end: of the stretch.
    """
    if not spans and start < end:  # most spans
        yield _Piece(start, end, None)
        return
    open_: list[tuple[int, int, RecordedSpan]] = []
    at, following = start, 0
    while at < end:
        while following < len(spans) and spans[following].start_ns <= at:
            span = spans[following]
            if span.end_ns > at:
                heapq.heappush(open_, (-span.end_ns, following, span))
            following += 1
        while open_ and -open_[0][0] <= at:
            heapq.heappop(open_)
        until = min(end, spans[following].start_ns) if following < len(spans) else end
        if open_:
            until = min(until, -open_[0][0])
            yield _Piece(at, until, open_[0][2])
        else:
            yield _Piece(at, until, None)
        at = until


def _is_known(span: RecordedSpan) -> bool:
    name = span.name
    return (
        name in PART_NAMES
        or name in STEP_PARTS
        or name in LEAVES
        or name in HOLDERS
        or (name.startswith(CALL) and name.removeprefix(CALL) in STEP_PARTS)
    )


def _stage_of(request: TracedRequest, span: RecordedSpan) -> OwnedStage:
    """The stage of time that a known span owns."""
    name = span.name
    if name in LEAVES:
        return OwnedStage(ORCHESTRATOR, name)
    if name in HOLDERS:
        return OwnedStage(ORCHESTRATOR, f"{name}.else")
    if name in PART_NAMES:
        return OwnedStage(_service(request, span, name.split(".")[0]), name)
    if name in STEP_PARTS:
        return OwnedStage(_service(request, span, name), f"{name}.else")
    if name.startswith(CALL):
        step = name.removeprefix(CALL)
        answered = any(child.name == step for child in request.children(span))
        part = "network" if answered else "unseen"
        return OwnedStage(_service(request, span, step), f"{step}.{part}")
    return OWN


def _service(request: TracedRequest, span: RecordedSpan, step: str) -> str:
    """The service of a step. A prefill below `open` is the target's, another the drafter's; a draft
    that the target made is the target's."""
    above: RecordedSpan | None = span
    if step == "draft":
        while above is not None and above.name != step:
            above = request.parent(above)
        return TARGET if above is not None and above.attributes.get(INSIDE) else DRAFTER
    if step != "prefill":
        return TARGET
    while above is not None and "prefill" in above.name:
        above = request.parent(above)
    return DRAFTER if above is request.root else TARGET

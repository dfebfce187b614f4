"""One request: its stages, and its spans as an indented waterfall."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

from rich.table import Table
from rich.text import Text

from tandem.tools.traces.analysis.attribution import OwnedInterval, segments
from tandem.tools.traces.analysis.stages import STAGES
from tandem.tools.traces.read.request import TracedRequest
from tandem.tools.traces.read.spans import RecordedSpan

_WIDTH = 40
_WAITED_FOR, _BESIDE = "█", "░"


class Waterfall:
    """A request's spans and its critical path.

    Args:
        request: to show.
        expanded: numbers of the rounds to show in detail; without any, the longest round.
    """

    def __init__(self, request: TracedRequest, expanded: Collection[int] = ()) -> None:
        self._request = request
        self.path: list[OwnedInterval] = segments(request)
        self._owned: dict[str, list[OwnedInterval]] = {}
        for segment in self.path:
            above: RecordedSpan | None = segment.span
            while above is not None:
                self._owned.setdefault(above.span_id, []).append(segment)
                above = request.parent(above)
        rounds = [span for span in request.children(request.root) if span.name == "round"]
        wanted = set(expanded)
        if not wanted and rounds:
            longest = max(rounds, key=lambda span: span.duration_ns)
            wanted = {longest.number("tandem.round") or 0}
        self._folded = {
            span.span_id for span in rounds if (span.number("tandem.round") or 0) not in wanted
        }

    def as_json(self) -> dict[str, Any]:
        """For json.dumps; times are milliseconds from the request's start."""
        root = self._request.root
        return {
            "request_id": self._request.id,
            "trace_id": root.trace_id,
            "wall_ms": self._request.wall_ns / 1e6,
            "stages": self._stages(),
            "critical_path": [
                {
                    "start_ms": (segment.start_ns - root.start_ns) / 1e6,
                    "duration_ms": segment.duration_ns / 1e6,
                    "span_id": segment.span.span_id,
                    "span": segment.span.name,
                    "service": segment.stage.service,
                    "stage": segment.stage.name,
                }
                for segment in self.path
            ],
        }

    def _stages(self) -> list[dict[str, Any]]:
        spent: Counter[object] = Counter()
        for segment in self.path:
            spent[segment.stage] += segment.duration_ns
        wall = self._request.wall_ns
        return [
            {
                "service": stage.service,
                "stage": stage.name,
                "ms": spent[stage] / 1e6,
                "share": spent[stage] / wall if wall else 0.0,
            }
            for stage in STAGES
            if stage in spent
        ]

    def stages(self) -> Table:
        """Its stages, which add up to its wall time."""
        table = Table("service", "stage", "milliseconds", "share", title=f"{self._request.id}")
        for column in table.columns[2:]:
            column.justify = "right"
        for row in self._stages():
            share = f"{row['share']:.1%}"
            table.add_row(row["service"], row["stage"], f"{row['ms']:.3f}", share)
        table.add_section()
        total = sum(row["share"] for row in self._stages())
        table.add_row("", "wall time", f"{self._request.wall_ns / 1e6:.3f}", f"{total:.1%}")
        return table

    def lines(self) -> Iterator[Text]:
        """A line for each span: its place in time, and how long the request waited for it."""
        yield Text(
            f"{'span':<34} {'start':>10} {'ms':>9} {'waited':>9}  {_WAITED_FOR} on the"
            f" critical path, {_BESIDE} off it; the inside of a round has its own scale",
            style="bold",
        )
        yield from self._lines(self._request.root, 0, self._request.root)

    def _lines(self, span: RecordedSpan, depth: int, scale: RecordedSpan) -> Iterator[Text]:
        root = self._request.root
        owned = self._owned.get(span.span_id, [])
        waited = sum(segment.duration_ns for segment in owned)
        label = "  " * depth + self._label(span)
        yield Text(
            f"{label:<34.34} {(span.start_ns - root.start_ns) / 1e6:>10.3f}"
            f" {span.duration_ns / 1e6:>9.3f} {waited / 1e6:>9.3f}  "
        ).append(_bar(span, owned, scale), style="" if waited else "dim")
        if span.span_id in self._folded:
            return
        if span.name == "round":
            scale = span
        for child in self._request.children(span):
            yield from self._lines(child, depth + 1, scale)

    def _label(self, span: RecordedSpan) -> str:
        where = "" if span.process == self._request.root.process else f" ({span.process.service})"
        if span.name != "round":
            return span.name + (where if "." not in span.name else "")
        accepted, depth = span.number("tandem.accepted"), span.number("tandem.depth")
        kept = "" if accepted is None else f": {accepted} of {depth or 0} kept"
        return f"round {span.number('tandem.round')}{kept}"


def _bar(span: RecordedSpan, owned: list[OwnedInterval], scale: RecordedSpan) -> str:
    """A bar that shows where a span lies within another one."""
    cells = [" "] * _WIDTH
    for start, end, mark in (
        (span.start_ns, span.end_ns, _BESIDE),
        *((segment.start_ns, segment.end_ns, _WAITED_FOR) for segment in owned),
    ):
        whole = scale.duration_ns or 1
        first = (start - scale.start_ns) * _WIDTH // whole
        last = (end - scale.start_ns) * _WIDTH // whole
        for cell in range(max(first, 0), min(max(last, first + 1), _WIDTH)):
            cells[cell] = mark
    return "".join(cells).rstrip()

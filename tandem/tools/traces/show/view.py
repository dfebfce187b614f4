"""One self-contained page with the waterfalls of a recording's requests.

The page's own code is `view.html`; this writes the data into it, request by request.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from tandem.tools.traces.analysis.attribution import segments
from tandem.tools.traces.analysis.stages import STAGES
from tandem.tools.traces.read.recording import Recording
from tandem.tools.traces.read.request import TracedRequest
from tandem.tools.traces.read.spans import RecordedSpan

# A browser would take too long to open a page of more: 1,000 requests take a second or two.
MAX_REQUESTS = 2_000
_MARK = "/*DATA*/"
_TEXT = "tandem.text."


def write(
    recording: Recording, put: Callable[[str], object], only: TracedRequest | None = None
) -> int:
    """Write the page, with the first `MAX_REQUESTS` requests, including failed ones.

    Args:
        recording: to show.
        put: is called with each piece of the page.
        only: the one request to show; None for all.

    Returns:
        Number of requests that were left out.
    """
    head, tail = (
        files("tandem.tools.traces.show").joinpath("view.html").read_text("utf-8").split(_MARK)
    )
    put(head)
    names = _Names()
    put('{"requests": [\n')
    seen = 0
    for request in (only,) if only else recording.requests():
        seen += 1
        if seen <= MAX_REQUESTS:
            put((",\n" if seen > 1 else "") + _safe(_request(request, names)))
    stages = [str(stage) for stage in STAGES]
    put(f'],\n"names": {_safe(list(names.index))}, "stages": {_safe(stages)}}}')
    put(tail)
    return max(seen - MAX_REQUESTS, 0)


class _Names:
    """Numbers names as they appear: with a name in each span, names would be most of the page."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {}

    def number(self, name: str) -> int:
        return self.index.setdefault(name, len(self.index))


def _safe(value: object) -> str:
    """JSON that cannot end the surrounding script, whatever a model wrote."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _request(request: TracedRequest, names: _Names) -> dict[str, Any]:
    path = segments(request)
    waited: Counter[str] = Counter()
    stages: Counter[int] = Counter()
    for segment in path:
        waited[segment.span.span_id] += segment.duration_ns
        stages[STAGES.index(segment.stage)] += segment.duration_ns
    rows: list[list[Any]] = []
    _rows(request, request.root, 0, waited, names, rows)
    root = request.root
    status = "cancelled" if request.cancelled else "failed" if request.failed else "ok"
    return {
        "id": request.id,
        "trace": root.trace_id,
        "at": root.start_ns // 1_000_000,
        "us": _micros(request.wall_ns),
        "tokens": request.tokens,
        "status": status,
        "stages": {index: _micros(spent) for index, spent in sorted(stages.items())},
        # Name, service, depth; start, duration, time waited for (microseconds); a round's data.
        "spans": rows,
    }


def _rows(
    request: TracedRequest,
    span: RecordedSpan,
    depth: int,
    waited: Counter[str],
    names: _Names,
    rows: list[list[Any]],
) -> int:
    """Add the rows of a span and all below it, in a waterfall's order; return the time waited."""
    start = _micros(span.start_ns - request.root.start_ns)
    named = names.number(span.name), names.number(span.process.service)
    row: list[Any] = [*named, depth, start]
    row += [_micros(span.duration_ns), 0]
    if span.name == "round":
        row.append(_round(span))
    rows.append(row)
    owned = waited[span.span_id]
    for child in request.children(span):
        owned += _rows(request, child, depth + 1, waited, names, rows)
    row[5] = _micros(owned)
    return owned


def _round(span: RecordedSpan) -> dict[str, Any]:
    """The data of a round's row: counts, and texts if they were recorded."""
    found: dict[str, Any] = {
        key: span.number(f"tandem.{key}") for key in ("round", "depth", "nodes", "accepted")
    }
    if "tandem.bonus" in span.attributes:  # as older recordings have it not
        found["bonus"] = span.attributes["tandem.bonus"]
    texts = {k.removeprefix(_TEXT): v for k, v in span.attributes.items() if k.startswith(_TEXT)}
    return {**found, "texts": texts} if texts else found


def _micros(nanoseconds: int) -> float:
    return round(nanoseconds / 1e3, 1)

"""Spans as comma-separated values: one line per span."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from tandem.tools.traces.analysis.attribution import OwnedInterval, segments
from tandem.tools.traces.analysis.stages import OwnedStage
from tandem.tools.traces.read.recording import Recording
from tandem.tools.traces.read.request import TracedRequest
from tandem.tools.traces.read.spans import RecordedKind, RecordedSpan

COLUMNS = (
    *("request_id", "trace_id", "span_id", "parent_id", "service", "instance", "name", "kind"),
    # stage: what the span's own time counts for; empty if the request never waited for the span.
    *("stage_service", "stage", "round", "start_ns", "duration_ns", "waited_ns"),
    *("gamma", "depth", "accepted", "verifier", "batch_size", "tokens", "error"),
)


def write(recording: Recording, only: TracedRequest | None, put: Callable[[str], object]) -> None:
    """Write a head line, and a line for each span of the requests and of engines' passes.

    Args:
        recording: all of its requests are written, including failed ones.
        only: write only this request, and no passes.
        put: is called with each line.
    """
    rows = csv.writer(_Sink(put), lineterminator="\n")
    rows.writerow(COLUMNS)
    if only is not None:
        rows.writerows(_of_request(only))
        return
    passes: list[RecordedSpan] = []
    for request in recording.requests(passes.append):
        rows.writerows(_of_request(request))
        rows.writerows(_of_passes(passes))
    rows.writerows(_of_passes(passes))


class _Sink:
    """The file-like object that csv writes to."""

    def __init__(self, put: Callable[[str], object]) -> None:
        self._put = put

    def write(self, line: str) -> None:
        self._put(line)


def _of_request(request: TracedRequest) -> Iterator[list[Any]]:
    waited, stages = _waited(segments(request))
    for span in request.spans:
        stage = stages.get(span.span_id)
        round_ = _round(request, span)
        owned = waited[span.span_id]
        yield _row(span, request.id, stage, round_, owned)


def _of_passes(passes: list[RecordedSpan]) -> Iterator[list[Any]]:
    """The rows of the passes so far; empties the list."""
    yield from (_row(span, "", None, None, 0) for span in passes)
    passes.clear()


def _waited(path: list[OwnedInterval]) -> tuple[Counter[str], dict[str, OwnedStage]]:
    waited: Counter[str] = Counter()
    stages: dict[str, OwnedStage] = {}
    for segment in path:
        waited[segment.span.span_id] += segment.duration_ns
        stages[segment.span.span_id] = segment.stage
    return waited, stages


def _round(request: TracedRequest, span: RecordedSpan) -> int | None:
    """Number of the round that a span belongs to; None outside of rounds."""
    above: RecordedSpan | None = span
    while above is not None and above.name != "round":
        above = request.parent(above)
    return above.number("tandem.round") if above is not None else None


def _row(
    span: RecordedSpan,
    request_id: str,
    stage: OwnedStage | None,
    round_: int | None,
    waited_ns: int,
) -> list[Any]:
    error = span.text("error.type") or ("error" if span.failed else "")
    return [
        *(request_id, span.trace_id, span.span_id, span.parent_id, *span.process, span.name),
        *(RecordedKind(span.kind).name.lower(), *(stage or ("", "")), round_),
        *(span.start_ns, span.duration_ns, waited_ns),
        *(span.number(f"tandem.{key}") for key in ("gamma", "depth", "accepted")),
        span.text("tandem.verifier"),
        *(span.number(f"tandem.{key}") for key in ("batch_size", "tokens")),
        error,
    ]

"""Spans of many files, grouped by trace.

A trace is spread over the services' files, so it is complete only when the last file is read.
Spans wait in a temporary SQLite database, which stays in its page cache while it is small and
goes to disk beyond that: nothing is sampled, and memory is bounded by `_CACHE_MIB`.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby, islice
from operator import attrgetter
from typing import Any

from tandem.failure import Failure
from tandem.tools.traces.read.source import LeftOut
from tandem.tools.traces.read.spans import Process, RecordedKind, RecordedSpan

_CACHE_MIB = 64
_BATCH = 2_000
# One trace is in memory at a time; a text of 8,192 tokens makes some 160,000 spans.
MAX_TRACE_SPANS = 400_000

_SCHEMA = """
CREATE TABLE spans (
    trace TEXT, span TEXT, parent TEXT, process INTEGER, name TEXT, kind INTEGER,
    start INTEGER, end INTEGER, failed INTEGER, attributes TEXT, events TEXT, links TEXT,
    PRIMARY KEY (trace, span)
) WITHOUT ROWID
"""
_INSERT = "INSERT OR IGNORE INTO spans VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_EXCHANGES = """
SELECT caller.process, callee.process, caller.kind, caller.start, caller.end, callee.start,
       callee.end
FROM spans callee CROSS JOIN spans caller
  ON caller.trace = callee.trace AND caller.span = callee.parent
WHERE callee.kind = ? AND caller.process != callee.process
"""


class Exchange:
    """A call, with the times of both sides, each by its own clock.

    Attributes:
        caller: the process that called.
        callee: the process that answered.
        exact: whether the caller's times are those of this call alone, not of a longer span.
        sent_ns: by the caller's clock, as is `back_ns`.
        got_ns: by the callee's clock, as is `answered_ns`.
    """

    __slots__ = ("answered_ns", "back_ns", "callee", "caller", "exact", "got_ns", "sent_ns")

    def __init__(
        self, caller: Process, callee: Process, exact: bool, times: tuple[int, int, int, int]
    ) -> None:
        self.caller = caller
        self.callee = callee
        self.exact = exact
        self.sent_ns, self.back_ns, self.got_ns, self.answered_ns = times


class Store:
    """All spans that were read, until the end of a command.

    Raises, from each method:
        Failure: the disk is full, or there is no place for temporary files.
    """

    def __init__(self) -> None:
        self._processes: dict[Process, int] = {}
        with _reported():
            self._base = sqlite3.connect("")  # a private temporary database
            self._base.execute(f"PRAGMA cache_size = -{_CACHE_MIB << 10}")
            self._base.execute("PRAGMA journal_mode = OFF")
            self._base.execute(_SCHEMA)

    def add(self, spans: Iterable[RecordedSpan], left_out: LeftOut) -> None:
        """Keep spans; one that was read before counts as a duplicate."""
        with _reported():
            rows_of = map(self._row, spans)
            while rows := list(islice(rows_of, _BATCH)):
                added = self._base.executemany(_INSERT, rows).rowcount
                left_out.duplicates += len(rows) - added

    def _row(self, span: RecordedSpan) -> tuple[object, ...]:
        process = self._processes.setdefault(span.process, len(self._processes))
        return (
            *(span.trace_id, span.span_id, span.parent_id, process, span.name, span.kind),
            *(span.start_ns, span.end_ns, span.failed),
            *(json.dumps(part) if part else "" for part in (span.attributes, span.events)),
            json.dumps(span.links) if span.links else "",
        )

    def first_ns(self) -> int:
        """The earliest start of all; 0 if there are no spans."""
        with _reported():
            (first,) = self._base.execute("SELECT min(start) FROM spans").fetchone()
        return first or 0

    def processes(self) -> list[Process]:
        """The processes that wrote the spans."""
        return list(self._processes)

    def exchanges(self) -> Iterator[Exchange]:
        """Every call whose two sides were both recorded."""
        processes = self.processes()
        with _reported():
            for caller, callee, kind, *times in self._base.execute(
                _EXCHANGES, (RecordedKind.SERVER,)
            ):
                sent, back, got, answered = times
                yield Exchange(
                    processes[caller],
                    processes[callee],
                    kind == RecordedKind.CLIENT,
                    (sent, back, got, answered),
                )

    def traces(self, left_out: LeftOut) -> Iterator[list[RecordedSpan]]:
        """The spans of one trace after the other, in the order of their ids."""
        processes = self.processes()
        with _reported():
            rows = self._base.execute("SELECT * FROM spans ORDER BY trace, span")
            spans = (_span(row, processes) for row in rows)
            for _, found in groupby(spans, attrgetter("trace_id")):
                trace: list[RecordedSpan] = []
                for span in found:
                    if len(trace) < MAX_TRACE_SPANS:
                        trace.append(span)
                    else:
                        left_out.crowded_spans += 1
                yield trace


def _span(row: tuple[Any, ...], processes: list[Process]) -> RecordedSpan:
    trace, span, parent, process, name, kind, start, end, failed, *parts = row
    attributes, events, links = (json.loads(part) if part else None for part in parts)
    return RecordedSpan(
        trace_id=trace,
        span_id=span,
        parent_id=parent,
        process=processes[process],
        name=name,
        kind=kind,
        start_ns=start,
        end_ns=end,
        failed=bool(failed),
        attributes=attributes or {},
        events=events or [],
        links=links or [],
    )


@contextmanager
def _reported() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise Failure(f"cannot keep the spans in a temporary file: {error}") from error

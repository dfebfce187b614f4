"""Chrome trace events, for ui.perfetto.dev, speedscope and chrome://tracing.

A service is a process, a request's sequence on it a thread, a span a complete event. Spans of one
request that overlap without nesting (the drafter's prefill and the first round) get a second
thread, since slices of a thread must nest. An arrow leads from each draft to its verification.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from tandem.tools.traces.read.recording import Recording
from tandem.tools.traces.read.request import TracedRequest
from tandem.tools.traces.read.spans import Process, RecordedSpan

_PASSES = "passes"
Event = dict[str, Any]


def write(recording: Recording, only: TracedRequest | None, put: Callable[[str], object]) -> None:
    """Write a document of trace events, event by event.

    Args:
        recording: all of its requests are written, including failed ones.
        only: write only this request, and no passes.
        put: is called with each piece of the document.
    """
    events = Events(recording.first_ns)
    put('{"displayTimeUnit": "ms", "traceEvents": [\n')
    between = ""
    for event in events.of_request(only) if only is not None else events.of(recording):
        put(between + json.dumps(event))
        between = ",\n"
    put("\n]}\n")


class Events:
    """Makes events, and numbers processes and threads as they appear.

    Args:
        zero_ns: the time that counts as 0. Microseconds since the epoch would lose their fractions.
    """

    def __init__(self, zero_ns: int) -> None:
        self._zero_ns = zero_ns
        self._pids: dict[Process, int] = {}
        self._threads = 0
        self._pass_threads: dict[Process, int] = {}
        self._flows = 0

    def of(self, recording: Recording) -> Iterator[Event]:
        """The events of all requests and passes."""
        passes: list[RecordedSpan] = []
        for request in recording.requests(passes.append):
            yield from self._of_passes(passes)
            yield from self.of_request(request)
        yield from self._of_passes(passes)

    def of_request(self, request: TracedRequest) -> Iterator[Event]:
        """The events of one request."""
        lanes: dict[Process, list[_Lane]] = {}
        places: dict[str, tuple[int, int]] = {}
        for span in sorted(request.spans, key=lambda span: (span.start_ns, -span.end_ns)):
            yield from self._process(span.process)
            mine = lanes.setdefault(span.process, [])
            lane = next((lane for lane in mine if lane.takes(span, request)), None)
            if lane is None:
                self._threads += 1
                beside = f", beside {len(mine)}" if mine else ""
                lane = _Lane(self._threads)
                mine.append(lane)
                yield self._name("thread_name", span, lane.tid, f"{request.id}{beside}")
            lane.add(span)
            places[span.span_id] = self._pids[span.process], lane.tid
            yield self._complete(span, lane.tid)
        for round_ in request.rounds():
            if round_.draft is not None and round_.verify is not None:
                yield from self._arrow(round_.draft, round_.verify, places)

    def _of_passes(self, passes: list[RecordedSpan]) -> Iterator[Event]:
        """The events of the passes so far; empties the list."""
        for span in passes:
            yield from self._process(span.process)
            if span.process not in self._pass_threads:
                self._threads += 1
                self._pass_threads[span.process] = self._threads
                yield self._name("thread_name", span, self._threads, _PASSES)
            yield self._complete(span, self._pass_threads[span.process])
        passes.clear()

    def _process(self, process: Process) -> Iterator[Event]:
        if process in self._pids:
            return
        pid = self._pids[process] = len(self._pids) + 1
        name = f"{process.service} {process.instance[:8]}".strip()
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}

    def _name(self, what: str, span: RecordedSpan, tid: int, name: str) -> Event:
        pid = self._pids[span.process]
        return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}

    def _complete(self, span: RecordedSpan, tid: int) -> Event:
        return {
            "ph": "X",
            "name": span.name,
            "cat": "tandem",
            "pid": self._pids[span.process],
            "tid": tid,
            "ts": self._micros(span.start_ns),
            "dur": span.duration_ns / 1e3,
            "args": {"span_id": span.span_id, **span.attributes},
        }

    def _arrow(
        self, draft: RecordedSpan, verify: RecordedSpan, places: dict[str, tuple[int, int]]
    ) -> Iterator[Event]:
        """Both ends of an arrow, which viewers bind to the slices around them."""
        self._flows += 1
        last_within = max(draft.end_ns - 1, draft.start_ns)
        for ph, span, at in (("s", draft, last_within), ("f", verify, verify.start_ns)):
            pid, tid = places[span.span_id]
            event = {"ph": ph, "name": "draft", "cat": "tandem", "id": self._flows}
            event |= {"pid": pid, "tid": tid, "ts": self._micros(at)}
            yield event | ({"bp": "e"} if ph == "f" else {})

    def _micros(self, nanoseconds: int) -> float:
        return (nanoseconds - self._zero_ns) / 1e3


class _Lane:
    """A thread whose slices nest."""

    def __init__(self, tid: int) -> None:
        self.tid = tid
        self._open: list[RecordedSpan] = []

    def takes(self, span: RecordedSpan, request: TracedRequest) -> bool:
        """Whether a span starts after all open ones, or lies within the last, its ancestor."""
        while self._open and self._open[-1].end_ns <= span.start_ns:
            self._open.pop()
        if not self._open:
            return True
        above = request.parent(span)
        while above is not None and above is not self._open[-1]:
            above = request.parent(above)
        return above is not None and span.end_ns <= above.end_ns

    def add(self, span: RecordedSpan) -> None:
        """Add a span as the innermost open one."""
        self._open.append(span)

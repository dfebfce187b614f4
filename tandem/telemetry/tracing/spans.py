"""Spans as they are recorded here: a few slots while they run, the SDK's form when they end.

The SDK's own spans take 15 microseconds each, ten times as long. Nor do they reveal a span's id
before it starts, which a pass needs to link to the rounds that it serves.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from tandem.errors import TandemError, cut
from tandem.telemetry.harmless import harmless
from tandem.telemetry.tracing.ids import SpanIds

# Named like OpenTelemetry's own loggers, whose lines are rate-limited.
_log = logging.getLogger("opentelemetry.tandem")
T = TypeVar("T")
_PROPAGATOR = TraceContextTextMapPropagator()
# A shorter wait or computation has no span of its own: it counts for the outer span.
SHORTEST_NS = 50_000
_TRACEPARENT = re.compile("00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class SpanRecord(Protocol):
    """An ended span, or a record from which several spans are made when they are written."""

    @property
    def context(self) -> SpanIds:
        """Ids of the outermost span."""

    def spans(self) -> Iterable[Span]:
        """All spans of the record. Called in the thread that writes."""


class Recorder(Protocol):
    """Where the process's spans go, and which are recorded."""

    def trace_id(self) -> int:
        """Id for a new trace."""

    def span_id(self) -> int:
        """Id for a new span."""

    def wants(self, context: Context, trace_id: int, name: str) -> bool:
        """Whether to record a request, from its first span in this process."""

    def write(self, record: SpanRecord) -> None:
        """Take an ended record. Never blocks."""


_recorder: Recorder | None = None


def install(recorder: Recorder | None) -> None:
    """Record the process's spans from now on; None records none."""
    global _recorder
    _recorder = recorder


class Span:
    """A span that is being recorded. Not safe across threads.

    Attributes:
        name: see docs/telemetry.md.
        parent: ids of the caller's or the outer span; None for the root of a trace.
        kind: server's or client's side of a call, or internal.
        links: spans that this one works for.
        start_ns: nanoseconds since the epoch; now by default.
        context: its ids.
        attributes: so far.
        events: names and times, nanoseconds since the epoch.
        error: a sentence if it failed, else empty.
        end_ns: nanoseconds since the epoch, once it has ended.
    """

    __slots__ = (
        "attributes",
        "context",
        "end_ns",
        "error",
        "events",
        "kind",
        "links",
        "name",
        "parent",
        "start_ns",
    )

    def __init__(
        self,
        name: str,
        parent: SpanIds | None,
        kind: SpanKind = SpanKind.INTERNAL,
        links: Sequence[SpanIds] = (),
        start_ns: int | None = None,
        context: SpanIds | None = None,
    ) -> None:
        self.name = name
        self.parent = parent
        self.kind = kind
        self.links = links
        self.start_ns = time.time_ns() if start_ns is None else start_ns
        self.context = below(parent) if context is None else context
        self.attributes: dict[str, AttributeValue] = {}
        self.events: list[tuple[str, int]] = []
        self.error = ""
        self.end_ns = 0

    @property
    def traceparent(self) -> str:
        """For messages, so that the spans they cause become children of this one."""
        context = self.context
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-01"

    def event(self, name: str) -> None:
        """Record an event that happens now."""
        self.events.append((name, time.time_ns()))

    def fail(self, error: BaseException) -> None:
        """Mark the span as failed, or as cancelled if the caller left.

        Only the messages of our own errors may leave the process: a library's may quote a prompt.
        """
        if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
            self.attributes["tandem.cancelled"] = True
            return
        name = self.attributes["error.type"] = type(error).__name__
        sentence = cut(str(error)) if isinstance(error, TandemError) else ""
        self.error = sentence.encode(errors="replace").decode() or name

    def end(self, at_ns: int | None = None) -> None:
        """End the span, and hand it to the recorder."""
        self.end_ns = time.time_ns() if at_ns is None else at_ns
        write(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End with the block, and fail if the block raised."""
        if error is not None:
            self.fail(error)
        self.end()

    def spans(self) -> Iterable[Span]:
        """See `SpanRecord`."""
        return (self,)


def write(record: SpanRecord) -> None:
    """Hand an ended record to the recorder. Never raises."""
    if _recorder is not None:
        with harmless:
            _recorder.write(record)


def guarded(records: Iterable[SpanRecord], encode: Callable[[Span], T]) -> list[T]:
    """All spans, encoded; if a span cannot be encoded, only its own record is lost."""
    found: list[T] = []
    for record in records:
        try:
            found += [encode(span) for span in record.spans()]
        except Exception:
            _log.warning("a span was lost that cannot be written", exc_info=True)
    return found


def below(parent: SpanIds | None) -> SpanIds:
    """Ids of a new span below a parent; None begins a new trace."""
    assert _recorder is not None  # without a recorder no span is made
    trace_id = _recorder.trace_id() if parent is None else parent.trace_id
    state = None if parent is None else parent.trace_state
    return SpanIds(trace_id, _recorder.span_id(), state)


def head(name: str, metadata: Mapping[str, str]) -> Span | None:
    """A request's first span in this process; None unless the sampler takes the request, or if the
    metadata or the sampler raise.

    That decision holds for all other spans of the request.

    Args:
        name: of the span.
        metadata: of the call; a well-formed traceparent in it names the caller's span.
    """
    if _recorder is None:
        return None
    with harmless:
        return _head(_recorder, name, metadata)
    return None


def _head(recorder: Recorder, name: str, metadata: Mapping[str, str]) -> Span | None:
    context = _PROPAGATOR.extract(dict(metadata), context=Context())
    caller = trace.get_current_span(context).get_span_context()
    parent = None
    if caller.is_valid:
        parent = SpanIds(caller.trace_id, caller.span_id, caller.trace_state)
    own = below(parent)
    if not recorder.wants(context, own.trace_id, name):
        return None
    return Span(name, parent, SpanKind.SERVER, context=own)


def caller_of(traceparent: str) -> SpanIds | None:
    """The span that a message belongs to; None if nothing is recorded, or it is malformed."""
    # int() alone would accept signs and spaces, and no encoder could write such an id.
    if _recorder is None or _TRACEPARENT.fullmatch(traceparent) is None:
        return None
    trace_id, span_id = int(traceparent[3:35], 16), int(traceparent[36:52], 16)
    flags = int(traceparent[53:], 16)
    return SpanIds(trace_id, span_id) if trace_id and span_id and flags & 1 else None

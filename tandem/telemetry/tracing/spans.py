"""Spans as they are recorded here: a few slots while they run, the SDK's form when they end.

The SDK's own spans take 15 microseconds each, ten times these, and one cannot know a span's id
before it starts, which a pass needs that is linked with the rounds that it serves.
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
from tandem.telemetry.tracing.ids import SpanIds

# As OpenTelemetry's own, of which a line is let through now and then.
_log = logging.getLogger("opentelemetry.tandem")
T = TypeVar("T")
_PROPAGATOR = TraceContextTextMapPropagator()
# A shorter wait or computation has no span of its own: it is a part of the outer one.
SHORTEST_NS = 50_000
_TRACEPARENT = re.compile("00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class SpanRecord(Protocol):
    """One span that has ended, or several that are made of it when they are written."""

    @property
    def context(self) -> SpanIds:
        """Of the outermost one."""

    def spans(self) -> Iterable[Span]:
        """All of them. In the thread that writes."""


class Recorder(Protocol):
    """Where the process's spans go, and which are recorded."""

    def trace_id(self) -> int:
        """Of a new trace."""

    def span_id(self) -> int:
        """Of a new span."""

    def wants(self, context: Context, trace_id: int, name: str) -> bool:
        """Whether a request is recorded, whose first span here it is."""

    def write(self, record: SpanRecord) -> None:
        """Take what has ended. Never waits."""


_recorder: Recorder | None = None


def install(recorder: Recorder | None) -> None:
    """Record the process's spans from now on; None records none."""
    global _recorder
    _recorder = recorder


class Span:
    """A span that is being recorded. Not safe across threads.

    Attributes:
        name: see docs/telemetry.md.
        parent: its caller's or its outer one's context; None for the root of a trace.
        kind: of call.
        links: others that it is done for.
        start_ns: of the epoch; now by default.
        context: its ids.
        attributes: so far.
        events: what happened, and when, in nanoseconds of the epoch.
        error: what it failed with, in a sentence.
        end_ns: of the epoch, once it has ended.
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
        """For messages, so that what they cause is recorded below this span."""
        context = self.context
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-01"

    def event(self, name: str) -> None:
        """Something happened now."""
        self.events.append((name, time.time_ns()))

    def fail(self, error: BaseException) -> None:
        """Mark it as failed; one whose caller left has not failed.

        Only our own errors have sentences that may leave the process: a library's may quote a
        prompt.
        """
        if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
            self.attributes["tandem.cancelled"] = True
            return
        name = self.attributes["error.type"] = type(error).__name__
        sentence = cut(str(error)) if isinstance(error, TandemError) else ""
        self.error = sentence.encode(errors="replace").decode() or name

    def end(self, at_ns: int | None = None) -> None:
        """Hand it to whoever writes it."""
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
        """It lasts as long as the block, and fails with it."""
        if error is not None:
            self.fail(error)
        self.end()

    def spans(self) -> Iterable[Span]:
        """See `SpanRecord`."""
        return (self,)


def write(record: SpanRecord) -> None:
    """Hand what has ended to whoever writes it."""
    if _recorder is not None:
        _recorder.write(record)


def guarded(records: Iterable[SpanRecord], encode: Callable[[Span], T]) -> list[T]:
    """Every span of records that can be encoded; one that cannot be loses its record alone."""
    found: list[T] = []
    for record in records:
        try:
            found += [encode(span) for span in record.spans()]
        except Exception:
            _log.warning("a span was lost that cannot be written", exc_info=True)
    return found


def below(parent: SpanIds | None) -> SpanIds:
    """Ids of a new span of a trace; None begins one."""
    assert _recorder is not None  # or there would be nothing to make it for
    trace_id = _recorder.trace_id() if parent is None else parent.trace_id
    state = None if parent is None else parent.trace_state
    return SpanIds(trace_id, _recorder.span_id(), state)


def head(name: str, metadata: Mapping[str, str]) -> Span | None:
    """The first span of a request here, if the sampler wants it: its decision holds for all others.

    Args:
        name: of the span.
        metadata: of the call; a traceparent in it is the caller's span, unless it is malformed.
    """
    if _recorder is None:
        return None
    context = _PROPAGATOR.extract(dict(metadata), context=Context())
    caller = trace.get_current_span(context).get_span_context()
    parent = None
    if caller.is_valid:
        parent = SpanIds(caller.trace_id, caller.span_id, caller.trace_state)
    own = below(parent)
    if not _recorder.wants(context, own.trace_id, name):
        return None
    return Span(name, parent, SpanKind.SERVER, context=own)


def caller_of(traceparent: str) -> SpanIds | None:
    """The span that a message belongs to; None where nothing is recorded, or it is malformed."""
    # Not by int() alone, which takes signs and spaces: no encoder takes such an id.
    if _recorder is None or _TRACEPARENT.fullmatch(traceparent) is None:
        return None
    trace_id, span_id = int(traceparent[3:35], 16), int(traceparent[36:52], 16)
    flags = int(traceparent[53:], 16)
    return SpanIds(trace_id, span_id) if trace_id and span_id and flags & 1 else None

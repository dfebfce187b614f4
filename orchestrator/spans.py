"""The orchestrator's spans of one text. A text that is not traced costs a look at a flag."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind
from opentelemetry.util.types import AttributeValue

from tandem.telemetry.tracing import context_of, fail, traceparent, tracer

_NOTHING: AbstractContextManager[None] = nullcontext()


class TextSpans:
    """The span of a text, and of what is done for it, one below the other.

    Attributes:
        traceparent: of the span that is open now; empty where nothing is recorded.

    Args:
        metadata: of the call, which may name the caller's span.
    """

    def __init__(self, metadata: Mapping[str, str]) -> None:
        self._text = tracer().start_span("generate", context_of(metadata), SpanKind.SERVER)
        self._recording = self._text.is_recording()
        self._innermost: Span = self._text
        self.traceparent = traceparent(self._text)

    def describe(self, attributes: Mapping[str, AttributeValue]) -> None:
        """Attributes of the span that is open now."""
        if self._recording:
            self._innermost.set_attributes(attributes)

    def child(self, name: str) -> AbstractContextManager[None]:
        """A span for the block, below the one that is open now."""
        return self._child(name) if self._recording else _NOTHING

    @contextmanager
    def _child(self, name: str) -> Iterator[None]:
        outer = self._innermost
        context: Context = trace.set_span_in_context(outer)
        span = self._innermost = tracer().start_span(name, context)
        self.traceparent = traceparent(span)
        try:
            yield
        except BaseException as error:
            fail(span, error)
            raise
        finally:
            span.end()
            self._innermost, self.traceparent = outer, traceparent(outer)

    def fail(self, error: BaseException) -> None:
        """Mark the text as failed."""
        fail(self._text, error)

    def end(self) -> None:
        """The text is over."""
        self._text.end()

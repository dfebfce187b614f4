"""The orchestrator's spans of one text. A text that is not traced costs a look at a flag."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from opentelemetry.trace import SpanKind
from opentelemetry.util.types import AttributeValue

from tandem.telemetry.logs import bind_span
from tandem.telemetry.tracing.ids import SpanIds
from tandem.telemetry.tracing.spans import SHORTEST_NS, Span, head

_NOTHING: AbstractContextManager[None] = nullcontext()


class TextSpans:
    """The span of a text, and of what is done for it, one below the other.

    Args:
        metadata: of the call, which may name the caller's span; None records nothing.
    """

    def __init__(self, metadata: Mapping[str, str] | None) -> None:
        self._text = None if metadata is None else head("generate", metadata)
        self._innermost = self._text
        if self._text is not None:
            bind_span(self._text.context)

    @property
    def context(self) -> SpanIds | None:
        """The text's; None where nothing is recorded."""
        return None if self._text is None else self._text.context

    def describe(self, attributes: Mapping[str, AttributeValue]) -> None:
        """Attributes of the span that is open now."""
        if self._innermost is not None:
            self._innermost.attributes.update(attributes)

    def note_first_token(self) -> None:
        """The first token is on its way to the client."""
        if self._text is not None:
            self._text.event("first_token")

    def child(self, name: str) -> AbstractContextManager[None]:
        """A span for the block, below the one that is open now."""
        return _NOTHING if self._innermost is None else self._child(name, self._innermost)

    @contextmanager
    def _child(self, name: str, outer: Span) -> Iterator[None]:
        try:
            with Span(name, outer.context) as self._innermost:
                yield
        finally:
            self._innermost = outer

    @contextmanager
    def brief(self, name: str) -> Iterator[None]:
        """The same for a block that takes no calls: no span where it is short."""
        if self._innermost is None:
            yield
            return
        started_ns = time.time_ns()
        try:
            yield
        finally:
            if time.time_ns() - started_ns >= SHORTEST_NS:
                Span(name, self._innermost.context, start_ns=started_ns).end()

    def call(self, step: str, method: str, address: str, of_text: bool = False) -> Span | None:
        """The span of an exchange with a service; None where nothing is recorded.

        Args:
            step: that it asks for.
            method: fully qualified, without the leading slash.
            address: of the peer.
            of_text: it lies below the text, and not below the span that is open now.
        """
        outer = self._text if of_text else self._innermost
        if outer is None:
            return None
        span = Span(f"call.{step}", outer.context, SpanKind.CLIENT)
        host, _, port = address.rpartition("/")[2].rpartition(":")
        span.attributes = {
            "rpc.system.name": "grpc",
            "rpc.method": method,
            "server.address": host.strip("[]") or address,
        }
        if port.isdecimal():
            span.attributes["server.port"] = int(port)
        return span

    def fail(self, error: BaseException) -> None:
        """Mark the text as failed."""
        if self._text is not None:
            self._text.fail(error)

    def end(self) -> None:
        """The text is over."""
        if self._text is not None:
            self._text.end()

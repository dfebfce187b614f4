"""A request: the tree of spans below one `generate`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tandem.tools.traces.read.clocks import Clocks
from tandem.tools.traces.read.spans import RecordedKind, RecordedSpan

# Our own trees are six deep; recursion over a chain of a million crafted spans would crash.
_MAX_DEPTH = 32
_FIRST_TOKEN = "first_token"


@dataclass(frozen=True, slots=True)
class TracedRound:
    """A round, read from its spans.

    Attributes:
        span: the orchestrator's span.
        draft: the drafter's span; None without a draft, or if its file is missing.
        verify: the target's span; None if its file is missing.
        gamma: depth of the draft.
        accepted: tokens kept.
        verifier: the rule that decided.
        prepared: what became of drafts that were prepared for it: "hit", "late" or "miss"; empty
            where none were.
        prepared_drafts: how many these were.
    """

    span: RecordedSpan
    draft: RecordedSpan | None
    verify: RecordedSpan | None
    gamma: int
    accepted: int
    verifier: str
    prepared: str = ""
    prepared_drafts: int = 0


class TracedRequest:
    """One Generate. Times of other processes are corrected to the orchestrator's clock.

    Attributes:
        root: its `generate`.
        spans: all of them, the root first, each before its children.
    """

    def __init__(
        self, root: RecordedSpan, children: dict[str, list[RecordedSpan]], clocks: Clocks
    ) -> None:
        self.root = root
        self.spans: list[RecordedSpan] = []
        self._children: dict[str, list[RecordedSpan]] = {}
        self._by_id: dict[str, RecordedSpan] = {}
        self._collect(children, clocks)

    def _collect(self, children: dict[str, list[RecordedSpan]], clocks: Clocks) -> None:
        """Collect the spans that can be reached from the root, level by level."""
        level = [self.root]
        for _ in range(_MAX_DEPTH):
            below: list[RecordedSpan] = []
            for span in level:
                _shift(span, clocks.offset_ns(self.root.process, span.process))
                self.spans.append(span)
                self._by_id[span.span_id] = span
                below += children.get(span.span_id, ())
            level = [span for span in below if span.span_id not in self._by_id]
        for span in self.spans[1:]:
            self._children.setdefault(span.parent_id, []).append(span)
        for found in self._children.values():
            found.sort(key=lambda span: (span.start_ns, span.end_ns))

    def children(self, span: RecordedSpan) -> list[RecordedSpan]:
        """A span's children, sorted by their starts."""
        return self._children.get(span.span_id, [])

    def parent(self, span: RecordedSpan) -> RecordedSpan | None:
        """A span's parent; None for the root."""
        return None if span is self.root else self._by_id[span.parent_id]

    @property
    def id(self) -> str:
        """The request's id, or else its trace id."""
        return self.root.text("tandem.request_id") or self.root.trace_id

    @property
    def wall_ns(self) -> int:
        """From the call to its end."""
        return self.root.duration_ns

    @property
    def cancelled(self) -> bool:
        """Whether its client left."""
        root = self.root
        cancelled = root.attributes.get("tandem.cancelled") is True
        return cancelled or root.text("error.type") == "CancelledError"

    @property
    def failed(self) -> bool:
        """Whether it ended with an error."""
        return self.root.failed and not self.cancelled

    @property
    def tokens(self) -> int:
        """Tokens that were emitted."""
        said = self.root.number("gen_ai.usage.output_tokens")
        return sum(r.accepted + 1 for r in self.rounds()) + 1 if said is None else said

    @property
    def prompt_tokens(self) -> int:
        """Of its prompt; 0 if not recorded."""
        return max(self.root.number("gen_ai.usage.input_tokens") or 0, 0)

    @property
    def cached_tokens(self) -> tuple[int, int]:
        """Of its prompt, that the target had computed before, and that the drafter had."""
        names = "gen_ai.usage.cache_read.input_tokens", "tandem.drafter_cached_tokens"
        target, drafter = (max(self.root.number(name) or 0, 0) for name in names)
        return target, drafter

    @property
    def first_token_ns(self) -> int | None:
        """From the call to its first token; None if not recorded."""
        for name, at in self.root.events:
            if name == _FIRST_TOKEN:
                return at - self.root.start_ns
        firsts = [s.end_ns for s in self.children(self.root) if s.name == "detokenize"]
        return firsts[0] - self.root.start_ns if firsts else None

    def server_side(self, span: RecordedSpan, name: str) -> RecordedSpan | None:
        """The service's span of a call below `span`, with or without a client span in between."""
        for child in self.children(span):
            if child.name == name and child.kind == RecordedKind.SERVER:
                return child
            if child.kind == RecordedKind.CLIENT and (found := self.server_side(child, name)):
                return found
        return None

    def rounds(self) -> Iterator[TracedRound]:
        """The rounds that were decided, in order."""
        for span in self.children(self.root):
            accepted = span.number("tandem.accepted")
            if span.name != "round" or accepted is None:
                continue
            yield TracedRound(
                span=span,
                draft=self.server_side(span, "draft"),
                verify=self.server_side(span, "verify"),
                gamma=max(span.number("tandem.depth") or 0, 0),
                accepted=accepted,
                verifier=span.text("tandem.verifier"),
                prepared=span.text("tandem.prepared"),
                prepared_drafts=max(span.number("tandem.prepared.drafts") or 0, 0),
            )


def _shift(span: RecordedSpan, ahead_ns: int) -> None:
    """Correct a span's times for a clock that is ahead."""
    span.start_ns -= ahead_ns
    span.end_ns -= ahead_ns


@dataclass(frozen=True)
class Trace:
    """The spans of one trace, sorted out.

    Attributes:
        requests: one for each `generate`.
        passes: spans of an engine's passes, which have traces of their own.
        orphans: spans that belong to no request here.
    """

    requests: list[TracedRequest]
    passes: list[RecordedSpan]
    orphans: list[RecordedSpan]


def sort_out(spans: Iterable[RecordedSpan], clocks: Clocks) -> Trace:
    """The requests among the spans of a trace."""
    children: dict[str, list[RecordedSpan]] = {}
    roots: list[RecordedSpan] = []
    rest: dict[str, RecordedSpan] = {}
    for span in spans:
        rest[span.span_id] = span
        if span.name == "generate":
            roots.append(span)
        elif span.parent_id:
            children.setdefault(span.parent_id, []).append(span)
    requests = [TracedRequest(root, children, clocks) for root in roots]
    for request in requests:
        for span in request.spans:
            rest.pop(span.span_id, None)
    passes = [span for span in rest.values() if span.name == "pass"]
    for span in passes:
        _shift(span, clocks.alone_ns(span.process))
    orphans = [span for span in rest.values() if span.name != "pass"]
    return Trace(requests, passes, orphans)

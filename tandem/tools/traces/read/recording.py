"""A recording: everything that was read for one command."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tandem.failure import Failure, Misconfigured
from tandem.tools.traces.read.clocks import Clocks, Skew, estimate
from tandem.tools.traces.read.request import TracedRequest, sort_out
from tandem.tools.traces.read.source import LeftOut, read, sources_of
from tandem.tools.traces.read.spans import RecordedSpan
from tandem.tools.traces.read.store import Store


class Recording:
    """The requests of trace files, one after the other.

    Attributes:
        left_out: counts of what no figure includes; complete once `requests` is exhausted.
        skews: of the clocks.

    Args:
        names: of files and folders, `-`, or addresses of a query API.
        advance: is called with the number of bytes of each read.

    Raises:
        Misconfigured: a file cannot be read, or none has a span of Tandem.
        Failure: there is no room for temporary files, or a query is not answered.
    """

    def __init__(
        self, names: Sequence[str], advance: Callable[[int], object] = lambda _: None
    ) -> None:
        self.left_out = LeftOut()
        self._store = Store()
        for source in sources_of(names):
            self._store.add(read(source, self.left_out, advance), self.left_out)
        if not self._store.processes():
            where = ", ".join(names)
            raise Misconfigured(f"no span of Tandem in {where}", tuple(self._seen_instead()))
        self.skews: list[Skew] = estimate(self._store.exchanges())
        self.first_ns = self._store.first_ns()

    def _seen_instead(self) -> list[str]:
        return [f"left out: {sentence}" for sentence in self.left_out.sentences()]

    def requests(
        self, on_pass: Callable[[RecordedSpan], object] = lambda _: None
    ) -> Iterator[TracedRequest]:
        """All requests, including failed ones. Can be iterated once.

        Args:
            on_pass: is called with each span of an engine's pass on the way.
        """
        clocks = Clocks(self.skews)
        for spans in self._store.traces(self.left_out):
            trace = sort_out(spans, clocks)
            for span in trace.passes:
                on_pass(span)
            self.left_out.orphans += len(trace.orphans)
            self.left_out.rootless_traces += bool(trace.orphans and not trace.requests)
            yield from trace.requests

    def finished(
        self, on_pass: Callable[[RecordedSpan], object] = lambda _: None
    ) -> Iterator[TracedRequest]:
        """The requests that ended well; the others are counted as left out.

        Raises:
            Failure: no request ended well.
        """
        found = False
        for request in self.requests(on_pass):
            if request.cancelled:
                self.left_out.cancelled_requests += 1
            elif request.failed:
                self.left_out.failed_requests += 1
            else:
                found = True
                yield request
        if not found:
            raise Failure("no request that ended well", tuple(self._seen_instead()))

    def request(self, wanted: str) -> TracedRequest:
        """The request whose id or trace id is, or begins with, `wanted`.

        Raises:
            Misconfigured: no request matches, or several begin with it.
        """
        found = None
        for request in self.requests():
            if wanted in (request.id, request.root.trace_id):
                return request
            if request.id.startswith(wanted) or request.root.trace_id.startswith(wanted):
                if found is not None:
                    raise Misconfigured(f"{wanted!r} is the beginning of several requests' ids")
                found = request
        if found is None:
            raise Misconfigured(f"no request {wanted!r}; the report lists the slowest ones' ids")
        return found

"""How far hosts' clocks are apart, from what both sides saw of the same calls, as NTP does."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from tandem.tools.traces.read.spans import Process
from tandem.tools.traces.read.store import Exchange

# The quickest exchanges say most: what a message waited for on its way is in the others.
_QUICKEST = 64


@dataclass(frozen=True)
class Skew:
    """A callee's clock against a caller's.

    Attributes:
        caller: whose clock is taken as right.
        callee: whose clock is corrected.
        offset_ns: what the callee's clock is ahead by.
        uncertainty_ns: the offset may be wrong by as much: half the round trip, since nobody
            knows how it is shared out between the two ways.
        exchanges: that were seen.
        measured: by exchanges; else only bounded by spans that must lie within others.
    """

    caller: Process
    callee: Process
    offset_ns: int
    uncertainty_ns: int
    exchanges: int
    measured: bool

    @property
    def seen(self) -> bool:
        """Whether the offset is larger than its own uncertainty."""
        return abs(self.offset_ns) > self.uncertainty_ns


@dataclass
class _Pair:
    """What two processes exchanged."""

    quickest: list[tuple[int, int]] = field(default_factory=list)
    exchanges: int = 0
    lowest_ns: int | None = None
    highest_ns: int | None = None

    def add(self, exchange: Exchange) -> None:
        self.exchanges += 1
        # The callee's span lies within the caller's, whatever else that one does.
        ahead = exchange.got_ns - exchange.sent_ns
        behind = exchange.answered_ns - exchange.back_ns
        self.highest_ns = ahead if self.highest_ns is None else min(self.highest_ns, ahead)
        self.lowest_ns = behind if self.lowest_ns is None else max(self.lowest_ns, behind)
        if exchange.exact:
            entry = (behind - ahead, (ahead + behind) // 2)  # minus the round trip, the offset
            push = heapq.heappush if len(self.quickest) < _QUICKEST else heapq.heappushpop
            push(self.quickest, entry)

    def skew(self, caller: Process, callee: Process) -> Skew:
        if self.quickest:
            offset = int(median(offset for _, offset in self.quickest))
            trip = int(median(-minus for minus, _ in self.quickest))
            # A negative round trip: the clocks drift, or the server's stamps lie outside.
            return Skew(caller, callee, offset, abs(trip) // 2, self.exchanges, True)
        low, high = self.lowest_ns or 0, self.highest_ns or 0
        middle = 0 if low <= 0 <= high else (low + high) // 2
        return Skew(caller, callee, middle, abs(high - low) // 2, self.exchanges, False)


def estimate(exchanges: Iterable[Exchange]) -> list[Skew]:
    """The skew of each pair of processes that spoke with each other.

    It is taken as constant for as long as the traces last.
    """
    pairs: dict[tuple[Process, Process], _Pair] = {}
    for exchange in exchanges:
        pairs.setdefault((exchange.caller, exchange.callee), _Pair()).add(exchange)
    return [pair.skew(*both) for both, pair in sorted(pairs.items())]


class Clocks:
    """Corrects times of callees to their callers' clocks."""

    def __init__(self, skews: Iterable[Skew]) -> None:
        self._offsets = {(skew.caller, skew.callee): skew.offset_ns for skew in skews}
        self._alone = {callee: offset for (_, callee), offset in self._offsets.items()}

    def offset_ns(self, caller: Process, callee: Process) -> int:
        """What the callee's clock is ahead by; 0 where nothing is known."""
        return self._offsets.get((caller, callee), 0)

    def alone_ns(self, process: Process) -> int:
        """What a process's clock is ahead by of one that calls it; 0 where nothing is known."""
        return self._alone.get(process, 0)

"""How far apart hosts' clocks are, from both sides' times of the same calls, as in NTP."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from tandem.tools.traces.read.spans import Process
from tandem.tools.traces.read.store import Exchange

# The quickest exchanges tell most: the others include queueing on the way.
_QUICKEST = 64


@dataclass(frozen=True)
class Skew:
    """A callee's clock against a caller's.

    Attributes:
        caller: the process whose clock is taken as right.
        callee: the process whose clock is corrected.
        offset_ns: how far the callee's clock is ahead.
        uncertainty_ns: largest error of the offset: half the round trip, because its split between
            the two directions is unknown.
        exchanges: number of exchanges.
        measured: whether the offset comes from client spans; else it is only bounded by spans that
            must lie within others.
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
        # The callee's span lies within the caller's, even if that one contains more than the call.
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
            # A round trip can be negative if clocks drift, or the server's times lie outside.
            return Skew(caller, callee, offset, abs(trip) // 2, self.exchanges, True)
        low, high = self.lowest_ns or 0, self.highest_ns or 0
        middle = 0 if low <= 0 <= high else (low + high) // 2
        return Skew(caller, callee, middle, abs(high - low) // 2, self.exchanges, False)


def estimate(exchanges: Iterable[Exchange]) -> list[Skew]:
    """The skew of each pair of processes that called each other, taken as constant."""
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
        """How far the callee's clock is ahead of the caller's; 0 if unknown."""
        return self._offsets.get((caller, callee), 0)

    def alone_ns(self, process: Process) -> int:
        """How far a process's clock is ahead of a caller's; 0 if unknown."""
        return self._alone.get(process, 0)

"""Which replica has the fewest texts, among thousands."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Protocol


class Loaded(Protocol):
    """A replica."""

    active: int


class Least:
    """Hands texts to the replica that has the fewest.

    Args:
        replicas: their `active` is counted here.
    """

    def __init__(self, replicas: Sequence[Loaded]) -> None:
        self._replicas = replicas
        self._heap = [(0, number) for number in range(len(replicas))]

    def take(self, most: int) -> int | None:
        """One more text on it: its number; None where all have `most`."""
        heap, replicas = self._heap, self._replicas
        while heap[0][0] != replicas[heap[0][1]].active:  # said before its load changed
            heapq.heappop(heap)
        active, number = heap[0]
        if active >= most:
            return None
        replicas[number].active += 1
        heapq.heapreplace(heap, (active + 1, number))
        return number

    def give_back(self, number: int) -> None:
        """One text less."""
        self._replicas[number].active -= 1
        heapq.heappush(self._heap, (self._replicas[number].active, number))

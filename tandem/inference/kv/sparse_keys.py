"""Which keys of a long text are seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class SparseKeys:
    """Which keys of a text are seen.

    Attributes:
        kind: "chunks" are chosen by their mean keys, for each layer and key head; "window" has none
            beside the first and the latest.
        budget: keys in all.
        sink: first ones, of these.
        recent: latest ones, of these, at least; 0 takes three quarters of the budget. With "window"
            they are all but the first, whatever this says.
        chunk: keys of a chunk.
    """

    kind: Literal["chunks", "window"] = "chunks"
    budget: int = 512
    sink: int = 16
    recent: int = 0
    chunk: int = 8

    @property
    def fault(self) -> str:
        """What is wrong with the numbers, for a sentence; empty for nothing."""
        if min(self.budget, self.chunk) < 1 or min(self.sink, self.recent) < 0:
            return "budget and chunk must be at least 1, sink and recent at least 0"
        if self.kind == "window":
            return "" if self.sink < self.budget else f"budget = {self.budget} leaves no latest key"
        if self.sink + self.latest + self.chunk > self.budget:
            return (
                f"budget = {self.budget} holds no chunk of {self.chunk} beside {self.sink} first"
                f" and {self.latest} latest keys"
            )
        return ""

    @property
    def latest(self) -> int:
        """`recent`, as it is meant."""
        return self.recent or self.budget * 3 // 4

    @property
    def chunks(self) -> int:
        """Chunks that are chosen."""
        if self.kind == "window":
            return 0
        return (self.budget - self.sink - self.latest) // self.chunk

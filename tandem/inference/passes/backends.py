"""The back ends of a model over time: each sequence stays with the one it began with."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.errors import Unsupported
from tandem.inference.feed import Feed
from tandem.inference.kv.extents import SequenceCache
from tandem.inference.loading.partial import WHOLE, ModelPart
from tandem.inference.output import PassOutput
from tandem.inference.passes.backend import Backend


class Backends:
    """The back end of new sequences, and earlier ones as long as they have sequences.

    Args:
        first: its pool is empty.
        for_trees: for sequences with branches, if `first` takes none.
        trees: whether to always keep a back end that takes trees.
    """

    def __init__(
        self, first: Backend, for_trees: Backend | None = None, trees: bool = False
    ) -> None:
        self._lock = threading.Lock()
        self._trees = trees
        # The last one is the current one.
        self._all: tuple[Backend, ...] = (first,) if for_trees is None else (for_trees, first)

    @property
    def current(self) -> Backend:
        """The back end of new sequences."""
        return self._all[-1]

    @property
    def serving(self) -> tuple[Backend, ...]:
        """Those of new sequences: the current one last, before it one for branches, if that is
        another."""
        apart = self._for_trees() if self._trees else None
        if apart is None or apart is self.current:
            return (self.current,)
        return apart, self.current

    @property
    def num_earlier(self) -> int:
        """Those that only open sequences use."""
        return len(self._all) - len(self.serving)

    def succeed(self, successor: Backend) -> None:
        """Make another back end the current one. From any thread."""
        with self._lock:
            self._all = (*self._all, successor)
            self._retire()

    @property
    def takes_trees(self) -> bool:
        """Whether a new sequence may have branches."""
        return any(backend.takes_trees for backend in self._all)

    def reserve(
        self, capacity: int, nodes: int = 0, held: int | None = None
    ) -> SequenceCache | None:
        """Room for a sequence, see `Model`; None if there is none now.

        Raises:
            Unsupported: `nodes` asks for branches, and no back end takes them.
        """
        with self._lock:
            backend = self._for_trees() if nodes else self.current
            if backend is None:
                raise Unsupported("this model takes no trees")
            cache: SequenceCache | None = backend.pool.reserve(capacity, held)
        return cache

    def _for_trees(self) -> Backend | None:
        """The back end of new sequences with branches: the latest one that takes them."""
        return next((backend for backend in reversed(self._all) if backend.takes_trees), None)

    def release(self, cache: SequenceCache) -> None:
        """Give a sequence's room back; from any thread."""
        with self._lock:
            cache.pool.release(cache)
            if len(self._all) > 1:
                self._retire()

    def forget_prefixes(self) -> int:
        """Let no prefix be found in any pool; positions that only prefixes held."""
        return sum(backend.pool.forget() for backend in self._all)

    def _retire(self) -> None:
        """Drop earlier back ends without sequences, with their weights and pools."""
        *earlier, current = self._all
        kept = self._for_trees() if self._trees else None
        left = [b for b in earlier if b is kept or b.pool.free_positions < b.pool.positions]
        self._all = (*left, current)

    def draw_on(self, feeds: Sequence[Feed], asked: npt.NDArray[np.float64]) -> Tensor | None:
        """See `Model.draw_on`."""
        pool = feeds[0].cache.pool
        backend = next(backend for backend in self._all if backend.pool is pool)
        if any(feed.cache.pool is not pool for feed in feeds):
            return None
        return backend.draw_on(feeds, asked)

    def forward(self, feeds: Sequence[Feed], part: ModelPart = WHOLE) -> PassOutput:
        """The requested rows, feed by feed, by the model or a part of it; see `Backend.forward`."""
        backends = self._all
        if part != WHOLE:
            backends = tuple(backend.view(part) for backend in backends)
        if len(backends) == 1:
            return backends[0].forward(feeds)
        logits: dict[int, Tensor] = {}
        states: dict[int, Tensor] = {}
        for backend in backends:
            own = [i for i, feed in enumerate(feeds) if feed.cache.pool is backend.pool]
            if own:
                output = backend.forward([feeds[i] for i in own])
                rows = torch.split(output.logits, [feeds[i].rows for i in own])
                logits.update(zip(own, rows, strict=True))
                if output.states is not None:
                    rows = torch.split(output.states, [feeds[i].states for i in own])
                    states.update(zip(own, rows, strict=True))
        return PassOutput(_in_order(logits), _in_order(states) if states else None)


def _in_order(parts: Mapping[int, Tensor]) -> Tensor:
    """One tensor of parts by number; back ends may differ in dtype."""
    return torch.cat([parts[i].float() for i in sorted(parts)])

"""A back end: one way to compute a model's pass, with the KV pool that it fills."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from tandem.inference.batch.packed import PackedBatch
from tandem.inference.feed import Feed, again, listed
from tandem.inference.hidden_states import Layers
from tandem.inference.kv.extents import SequenceCache
from tandem.inference.output import PassOutput


class CachePool(Protocol):
    """A KV pool, in a form that only its pass knows."""

    @property
    def positions(self) -> int:
        """Positions that all sequences may hold together."""

    @property
    def free_positions(self) -> int:
        """Positions that no sequence has reserved."""

    @property
    def bytes_per_position(self) -> int:
        """Bytes of one position in all layers."""

    def reserve(self, capacity: int) -> SequenceCache | None:
        """Room for a sequence; None if there is none now."""

    def release(self, cache: SequenceCache) -> None:
        """Give a sequence's room back."""

    def resized(self, positions: int) -> Any:
        """An empty pool with the same layers."""


class Pass(Protocol):
    """Computes a batch."""

    def __call__(self, batch: PackedBatch, pool: Any) -> PassOutput:
        """The rows that the batch asks for; keys and values go to the pool."""


class Captured(Protocol):
    """Captured passes for batches of certain sizes."""

    def fitting(self, feeds: Sequence[Feed]) -> Callable[[Sequence[Feed]], PassOutput] | None:
        """The captured pass that can compute a batch; None if there is none."""


class Backend:
    """A pass with its pool.

    Attributes:
        engine: its name, "torch" or "openvino".
        dtype: of weights and passes.
        compute: the pass.
        pool: the KV pool, in the pass's own form.
        device: where tokens and logits are.
        vocab_size: ids that it takes.
        tolerance: largest difference between rows of two batches, as a share of their size, that is
            the model's own noise.
        of_layers: whose hidden states the pass can give.
        blocks: the pass's layers, to be compared one by one; empty if they cannot be told apart.
        in_one_call: whether attention takes all sequences of a batch at once; the pool's blocks
            are then those of `tiles.py`.
        branches_in_one_call: whether it does so for batches with branches.
        takes_trees: whether siblings are known not to see each other.
        feeds_again: whether a feed below earlier branch rows must contain those rows too: the pass
            can hide rows of one feed from each other, but not rows that were fed before.
        graphs: captured passes for small batches; None if there are none.
        busy: lock held while the pass computes: it takes one batch at a time.
    """

    def __init__(
        self,
        engine: str,
        dtype: torch.dtype,
        compute: Pass,
        pool: CachePool,
        device: torch.device,
        vocab_size: int,
        *,
        of_layers: Layers = (),
        blocks: Sequence[nn.Module] = (),
        in_one_call: bool = False,
        feeds_again: bool = False,
    ) -> None:
        self.engine = engine
        self.of_layers = of_layers
        self.blocks: Sequence[nn.Module] = tuple(blocks)
        self.dtype = dtype
        self.pool: Any = pool
        self.busy = threading.RLock()
        self.compute = compute
        self.device = device
        self.vocab_size = vocab_size
        self.tolerance = 0.0
        self.in_one_call = in_one_call
        self.feeds_again = feeds_again
        self.branches_in_one_call = False
        self.takes_trees = True
        self.graphs: Captured | None = None

    def __str__(self) -> str:
        return name_of(self.engine, self.dtype)

    def beside(self, positions: int) -> Backend:
        """The same pass with a pool of its own, to try while this back end serves."""
        other = Backend(
            self.engine,
            self.dtype,
            self.compute,
            self.pool.resized(positions),
            self.device,
            self.vocab_size,
            of_layers=self.of_layers,
            blocks=self.blocks,
            in_one_call=self.in_one_call,
            feeds_again=self.feeds_again,
        )
        other.busy = self.busy
        other.tolerance = self.tolerance
        other.takes_trees = self.takes_trees
        other.branches_in_one_call = self.branches_in_one_call
        return other

    def forward(self, feeds: Sequence[Feed]) -> PassOutput:
        """Feed new tokens of different sequences; their caches grow.

        Returns:
            The requested rows, feed by feed, in the pass's dtype.

        Raises:
            ValueError: a feed does not fit its extent, a parent is no earlier row, the back end
                takes no trees and is given one, or it gives no hidden states and is asked for some.
        """
        if self.in_one_call:
            for feed in feeds:
                if not feed.cache.length and not feed.cache.branches:
                    self.pool.clear(feed.cache)
        if not self.takes_trees and any(feed.parents for feed in feeds):
            raise ValueError(f"{self} takes no trees")
        if not self.of_layers and any(feed.states for feed in feeds):
            raise ValueError(f"{self} gives no hidden states")
        with self.busy:
            output = self._computed(feeds)
        for feed in feeds:
            feed.cache.grow(listed(feed.token_ids), feed.parents)
        return output

    def _computed(self, feeds: Sequence[Feed]) -> PassOutput:
        graph = None if self.graphs is None else self.graphs.fitting(feeds)
        if graph is not None:
            return graph(feeds)
        if self.feeds_again:
            feeds = [again(feed) for feed in feeds]
        batch = PackedBatch.of(feeds, self.device, self.in_one_call, self.branches_in_one_call)
        return self.compute(batch, self.pool)


def name_of(engine: str, dtype: torch.dtype) -> str:
    """Name of a back end in logs and records: "torch float32"."""
    return f"{engine} {str(dtype).removeprefix('torch.')}"

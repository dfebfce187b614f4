"""A back end: one way to compute a model's pass, with the KV pool that it fills."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from tandem.inference.batch.packed import PackedBatch
from tandem.inference.feed import Feed, again, listed
from tandem.inference.hidden_states import Layers
from tandem.inference.kv.extents import SequenceCache
from tandem.inference.output import PassOutput, joined

# Fed at the start, in a plain pass and in batches: both must give the same logits.
PROBE = (0, 1, 2, 0, 2, 1, 0, 1, 1, 2, 0, 0)
PROBE_TOKENS = 2 * len(PROBE)
# The probe's trunk, and a second text that continues this trunk differently.
_TRUNK = PROBE[:5]
SIBLING = (*_TRUNK, 0, 2, 1)


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


class Computes(Protocol):
    """Whatever computes passes, to be probed and timed.

    Attributes:
        pool: reserves room, and takes it back.
        of_layers: whose hidden states it gives.
        busy: held during a pass by a thread that serves.
    """

    pool: Any
    of_layers: Layers
    busy: Any

    def forward(self, feeds: Sequence[Feed]) -> PassOutput:
        """See `tandem.engine.scorer.Scorer`."""


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
        of_layers: whose hidden states the pass can give.
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
        *,
        of_layers: Layers = (),
        in_one_call: bool = False,
        feeds_again: bool = False,
    ) -> None:
        self.engine = engine
        self.of_layers = of_layers
        self.dtype = dtype
        self.pool: Any = pool
        self.busy = threading.RLock()
        self.compute = compute
        self.device = device
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
            of_layers=self.of_layers,
            in_one_call=self.in_one_call,
            feeds_again=self.feeds_again,
        )
        other.busy = self.busy
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


def some_tokens(count: int) -> tuple[int, ...]:
    """This many tokens: the probe, repeated."""
    return (PROBE * (1 + count // len(PROBE)))[:count]


def name_of(engine: str, dtype: torch.dtype) -> str:
    """Name of a back end in logs and records: "torch float32"."""
    return f"{engine} {str(dtype).removeprefix('torch.')}"


def probe(backend: Computes, text: Sequence[int]) -> PassOutput:
    """The rows of a text, fed in pieces together with another sequence, with a rollback: logits
    [n, V], and hidden states if the back end gives any.

    Args:
        backend: its pool has room for the text twice.
        text: at least twelve tokens.
    """
    pool, part = backend.pool, len(text) // 12
    other, cache = pool.reserve(len(text)), pool.reserve(len(text))
    first, second, third = (text[: n * part] for n in (3, 5, 9))

    def whole(tokens: Sequence[int]) -> Feed:
        count = len(tokens)
        return Feed(cache, tokens, count, states=count if backend.of_layers else 0)

    backend.forward([Feed(other, first, 0)])
    head = backend.forward([whole(second), Feed(other, second[len(first) :], 1)])
    backend.forward([Feed(cache, [1] * len(first), 1)])
    cache.rollback(len(second))
    middle = backend.forward([Feed(other, text[len(second) :][:1], 0), whole(third[len(second) :])])
    *rest, last = text[len(third) :]
    alone = backend.forward([whole(rest)])
    single = backend.forward([whole([last])])  # may be computed by a different kernel
    for reserved in (other, cache):
        pool.release(reserved)
    return joined([head.first(len(second)), middle, alone, single])


def probe_tree(
    backend: Backend, expected: PassOutput, sibling: PassOutput
) -> tuple[PassOutput, PassOutput]:
    """Feed a small tree in two steps together with another sequence, and keep its second path.

    Args:
        backend: its pool has room for the probe twice.
        expected: plain rows of the probe.
        sibling: plain rows of `SIBLING`.

    Returns:
        The rows that the tree should give, and those that it gives, both of seven.
    """
    pool, end = backend.pool, len(_TRUNK)
    other, cache = pool.reserve(len(PROBE)), pool.reserve(len(PROBE))
    (first, second), (third, fourth, last) = PROBE[end : end + 2], SIBLING[end:]

    def whole(cache: SequenceCache, tokens: Sequence[int], parents: Sequence[int] = ()) -> Feed:
        count = len(tokens)
        return Feed(cache, tokens, count, parents or None, count if backend.of_layers else 0)

    backend.forward([Feed(cache, _TRUNK[:-1], 0)])
    grown = backend.forward(
        [whole(cache, [_TRUNK[-1], first, third], (0, 0)), Feed(other, PROBE[:2], 0)]
    )
    leaves = backend.forward([whole(cache, [second, fourth], (1, 2))])
    cache.keep((2, 4))
    kept = backend.forward([whole(cache, [last]), whole(other, PROBE[2:3])])
    for reserved in (other, cache):
        pool.release(reserved)
    wanted = [(expected, end - 1), (expected, end), (sibling, end)]
    wanted += [(expected, end + 1), (sibling, end + 1), (sibling, end + 2), (expected, 2)]
    return joined([plain.row(place) for plain, place in wanted]), joined([grown, leaves, kept])

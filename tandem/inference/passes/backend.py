"""A back end: one way to compute a model's pass, with the KV pool that it fills."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from tandem.inference.batch.packed import PackedBatch
from tandem.inference.feed import Feed, again, listed
from tandem.inference.hidden_states import Layers
from tandem.inference.kv.viewed import ViewedCache
from tandem.inference.loading.partial import WHOLE, ModelPart
from tandem.inference.output import PassOutput


class Pass(Protocol):
    """Computes a batch."""

    def __call__(self, batch: PackedBatch, pool: Any) -> PassOutput:
        """The rows that the batch asks for; keys and values go to the pool."""


class CapturedPasses(Protocol):
    """Captured passes for batches of certain sizes."""

    def __iter__(self) -> Iterator[Any]:
        """Those of each size."""

    def fitting(self, feeds: Sequence[Feed]) -> Callable[[Sequence[Feed]], PassOutput] | None:
        """The captured pass that can compute a batch; None if there is none."""


class CapturedChains(Protocol):
    """Captured passes with draws between them."""

    def __iter__(self) -> Iterator[Any]:
        """Those of each size."""

    def draw_on(self, feeds: Sequence[Feed], asked: npt.NDArray[np.float64]) -> Tensor | None:
        """What the first steps drew that can be computed at once; None where none can."""


@dataclass(eq=False, repr=False)
class Backend:
    """A pass with its pool.

    Attributes:
        engine: its name, "torch" or "openvino".
        dtype: of weights and passes.
        compute: the pass.
        pool: the KV pool, a `PositionPool` in the pass's own form.
        device: where tokens and logits are.
        vocab_size: ids that it takes.
        tolerance: largest difference between rows of two batches, as a share of their size, that is
            the model's own noise.
        of_layers: whose hidden states the pass can give.
        blocks: the pass's layers, to be compared one by one; empty if they cannot be told apart.
        in_one_call: whether attention takes all sequences of a batch at once, by kernels of our
            own.
        takes_trees: whether siblings are known not to see each other.
        windows: of its layers' attention, as far as a pass in one call has asked for them.
        feeds_again: whether a feed below earlier branch rows must contain those rows too: the pass
            can hide rows of one feed from each other, but not rows that were fed before.
        graphs: captured passes for small batches; None if there are none.
        chains: the same with draws between them; None if there are none.
        views: passes of parts of the model over the same pool, by what they are.
        is_view: whether it is such a part; its pass may give states [T, 1, width] of all tokens
            after an exit.
        busy: lock held while the pass computes: it takes one batch at a time.
    """

    engine: str
    dtype: torch.dtype
    compute: Pass
    pool: Any
    device: torch.device
    vocab_size: int
    tolerance: float = 0.0
    of_layers: Layers = ()
    blocks: Sequence[nn.Module] = ()
    in_one_call: bool = False
    takes_trees: bool = True
    windows: tuple[int | None, ...] = ()
    feeds_again: bool = False
    graphs: CapturedPasses | None = None
    chains: CapturedChains | None = None
    views: Mapping[ModelPart, Pass] = field(default_factory=dict)
    is_view: bool = False
    busy: threading.RLock = field(default_factory=threading.RLock)
    _made: dict[ModelPart, Backend] = field(default_factory=dict)

    def __str__(self) -> str:
        return name_of(self.engine, self.dtype)

    @property
    def form(self) -> str:
        """Its name, and how its pass is compiled where that may be another at the next start: what
        its passes take holds for this form."""
        return str(self) + getattr(self.compute, "form", "")

    def beside(self, positions: int, part: ModelPart = WHOLE) -> Backend:
        """The same pass, or that of a part, with a pool of its own, to try while this back end
        serves."""
        own = self if part == WHOLE else self.view(part)
        pool = self.pool.resized(positions)
        return replace(own, pool=pool, graphs=None, chains=None, _made={})

    def forward(self, feeds: Sequence[Feed]) -> PassOutput:
        """Feed new tokens of different sequences; their caches grow.

        Returns:
            The requested rows, feed by feed, in the pass's dtype.

        Raises:
            ValueError: a feed does not fit its extent, a parent is no earlier row, the back end
                takes no trees and is given one, or it gives no hidden states and is asked for some.
        """
        if not self.takes_trees and any(feed.parents for feed in feeds):
            raise ValueError(f"{self} takes no trees")
        if not self.of_layers and any(feed.states for feed in feeds):
            raise ValueError(f"{self} gives no hidden states")
        with self.busy:
            output = self._computed(feeds)
        if self.is_view:
            output = _noted(feeds, output)
        for feed in feeds:
            feed.cache.grow(listed(feed.token_ids), feed.parents)
        return output

    def view(self, part: ModelPart) -> Backend:
        """A part of the model as a back end: with the same pool, and one of both computes at a
        time."""
        made = self._made.get(part)
        if made is None or made.pool is not self.pool:
            made = replace(
                self,
                compute=self.views[part],
                graphs=None,
                chains=None,
                views={},
                is_view=True,
                _made={},
            )
            self._made[part] = made
        return made

    def draw_on(self, feeds: Sequence[Feed], asked: npt.NDArray[np.float64]) -> Tensor | None:
        """Draw chains, see `Model.draw_on`; their caches grow by as many tokens as were fed."""
        if self.chains is None:
            return None
        with self.busy:
            drawn = self.chains.draw_on(feeds, asked)
        if drawn is not None:
            for feed in feeds:
                feed.cache.grow(range(len(drawn)))
        return drawn

    def _computed(self, feeds: Sequence[Feed]) -> PassOutput:
        # Neither of both is captured.
        special = any(feed.resumed is not None or feed.choice is not None for feed in feeds)
        graph = None if self.graphs is None or special else self.graphs.fitting(feeds)
        if graph is not None:
            return graph(feeds)
        if self.feeds_again:
            feeds = [again(feed) for feed in feeds]
        batch = PackedBatch.of(feeds, self.device, self.in_one_call, self.windows)
        output = self.compute(batch, self.pool)
        if batch.tiles is not None:
            self.windows = batch.tiles.windows
        return output


def _noted(feeds: Sequence[Feed], output: PassOutput) -> PassOutput:
    """The rows of a part's pass; what is after its exit is noted in the caches of views."""
    if output.states is not None:
        parts = torch.split(output.states[:, 0], [len(feed.token_ids) for feed in feeds])
        for feed, states in zip(feeds, parts, strict=True):
            if isinstance(feed.cache, ViewedCache):
                feed.cache.exit_states.append(states)
    return PassOutput(output.logits)


def name_of(engine: str, dtype: torch.dtype) -> str:
    """Name of a back end in logs and records: "torch float32"."""
    return f"{engine} {str(dtype).removeprefix('torch.')}"

"""Drafts captured as CUDA graphs: passes of a row a text, and a draw after each.

Nothing of the host is between two tokens of a chain: what it would say of each pass is known when
the first one begins, and is sent at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.inference.batch.packed import PackedBatch, tokens_of
from tandem.inference.batch.segment import Segment
from tandem.inference.batch.tiles import ONE, WORDS, Tiles, TileSizes, one_row_each
from tandem.inference.feed import Feed
from tandem.kernels import draws
from tandem.speculation.request.sampling import Sampling

# A chain whose length is a sum of several of these sizes takes a replay for each. After the first
# token, a draft of 2, 4 or 8 takes one.
_STEPS = (1, 3, 7)
_ROWS = (1, 4, 16, 64)


# Share of a distribution that is kept, and the most tokens: `Truncation` of the engine's asks.
Cut = tuple[float, int]
# Captures what the first function launches. The second one runs before, so that kernels are
# compiled and memory is allocated. The result replays the work.
Capture = Callable[[Callable[[], None], Callable[[], None]], Callable[[], None]]


class ChainGraph:
    """Some steps of chains of at most `rows` texts. Each batch is copied to memory of the graph's
    own, where a replay writes. Spare rows write to a slot of the pool that no sequence has.

    Args:
        backend: whose pass it is.
        rows: of each pass: a text each.
        steps: passes, each with its draws.
        longest: longest text that it may see, in positions.
        cut: of the distributions.
        capture: of its work.
    """

    def __init__(
        self,
        backend: Any,
        rows: int,
        steps: int,
        longest: int,
        cut: Cut,
        capture: Capture,
    ) -> None:
        self.rows, self.steps = rows, steps
        self._backend, self._longest = backend, longest
        self._windows = backend.windows  # as they are captured, in this order
        device = backend.device
        self._room = TileSizes(rows, rows, ONE, WORDS)
        nothing = one_row_each([0], [0], self._room, self._windows, steps, backend.pool.scratch)
        # Spare rows draw the only token that they may.
        spare = draws.asked_of(range(rows), 1, [Sampling(temperature=0.0)] * rows, 1)
        self._spare = np.repeat(spare[None], steps, 0)
        numbers = nothing.size
        # One copy goes to the device.
        self._sent = torch.zeros(numbers + self._spare.size, dtype=torch.int64, device=device)
        places = self._sent[:numbers].view(steps, -1)
        self._asked = self._sent[numbers:].view(torch.float64).view(self._spare.shape)
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._fill([0], [0], self._spare[:, :1])
        # A pass may prepare data for all positions up to the longest text.
        segments = [Segment(0, 1, 0, longest)]
        beside = nothing[0, : 2 * rows]
        self._tiles = [
            Tiles(segments, device, self._room, self._windows, beside) for _ in range(steps)
        ]
        self._untaken = torch.empty(rows, 0, dtype=torch.int64, device=device)
        width = draws.width_of(cut[1], backend.vocab_size)
        self._drawn = torch.zeros(steps, rows, 1 + 2 * width, dtype=torch.int64, device=device)

        def run(count: int) -> None:
            tokens = self._tokens
            for step, own in enumerate(self._tiles[:count]):
                own.take(places[step])
                there = own.beside.view(2, -1)
                batch = PackedBatch(segments, tokens[None], there[:1], there[1], None, own)
                logits = backend.compute(batch, backend.pool).logits
                asked = self._asked[step]
                drawn = draws.draw(logits, asked, self._untaken, *cut, 1)
                self._drawn[step].copy_(drawn)
                tokens = drawn[:, 0]

        self._replay = capture(partial(run, steps), partial(run, 1))

    def fits(self, feeds: Sequence[Feed], steps: int) -> bool:
        """Whether it takes a batch, and no more steps than that."""
        reach = max(feed.cache.length for feed in feeds) + steps
        return len(feeds) <= self.rows and self.steps <= steps and reach <= self._longest

    def __call__(self, feeds: Sequence[Feed], asked: npt.NDArray[np.float64]) -> Tensor:
        """See `Chains.draw_on`. The caches do not grow yet."""
        caches = [feed.cache for feed in feeds]
        count = len(caches)
        self._fill([cache.start for cache in caches], [cache.length for cache in caches], asked)
        self._tokens[:count].copy_(tokens_of(feeds, self._tokens.device))
        self._replay()
        return self._drawn[:, :count].clone()

    def _fill(
        self, starts: Sequence[int], lengths: Sequence[int], asked: npt.NDArray[np.float64]
    ) -> None:
        """Send what is known of all steps."""
        pool = self._backend.pool
        numbers = one_row_each(starts, lengths, self._room, self._windows, self.steps, pool.scratch)
        wanted = self._spare.copy()
        wanted[:, : asked.shape[1]] = asked[: self.steps]
        both = np.concatenate((numbers.ravel(), wanted.view(np.int64).ravel()))
        self._sent.copy_(torch.from_numpy(both), non_blocking=True)


class Chains:
    """Captured chains of several sizes.

    Args:
        backend: whose passes they are; it has captured ones.
        rows: of the largest captured pass.
        longest: longest text to expect, in positions.
        cut: of the distributions.
        capture: see `ChainGraph`.
    """

    def __init__(
        self,
        backend: Any,
        rows: int,
        longest: int,
        cut: Cut,
        capture: Capture,
    ) -> None:
        self.cut = cut
        # The longest chains first; of each length, the fewest rows that do.
        sizes = itertools.product(reversed(_STEPS), (size for size in _ROWS if size <= rows))
        self._graphs = [
            ChainGraph(backend, size, steps, longest, cut, capture) for steps, size in sizes
        ]

    def __iter__(self) -> Iterator[ChainGraph]:
        return iter(self._graphs)

    def draw_on(self, feeds: Sequence[Feed], asked: npt.NDArray[np.float64]) -> Tensor | None:
        """Draw after a token of each text, then after that one, and so on.

        Args:
            feeds: of a token each, at the ends of trunks that are extents.
            asked: [S, R, DIGITS + 2]: of the rows of each pass, see `kernels.draws.asked_of`.

        Returns:
            [N, R, 1 + 2 K]: what the first N steps drew, see `kernels.draws.draw`; None where no
            captured chain takes the batch.
        """
        if any(feed.cache.table is not None for feed in feeds):
            return None
        graph = next((one for one in self._graphs if one.fits(feeds, len(asked))), None)
        return None if graph is None else graph(feeds, asked)

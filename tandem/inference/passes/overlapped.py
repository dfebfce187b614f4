"""A pass whose rows go through one group of layers each (PPD, Yang et al., arXiv 2307.05908; SPEED,
Hooper et al., arXiv 2310.12072)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tandem.inference.batch.packed import PackedBatch, Packing
from tandem.inference.batch.segment import Segment
from tandem.inference.feed import Feed, TokenInFlight
from tandem.inference.kv.pool import KVPool
from tandem.inference.output import PassOutput
from tandem.inference.passes.backend import Backend
from tandem.inference.passes.torch_llama import LayerGroup, LlamaPass


class Pipelines(Protocol):
    """Runs groups of layers."""

    def run(self, works: Mapping[int, Callable[[], Tensor]]) -> list[Tensor]:
        """What each work gives, by the number of its group; they do not need each other."""


class OnePipeline:
    """One group behind the other."""

    def run(self, works: Mapping[int, Callable[[], Tensor]]) -> list[Tensor]:
        """See `Pipelines`."""
        return [work() for work in works.values()]


ONE_PIPELINE = OnePipeline()


class TwoPipelines:
    """Two groups at the same time, by half of the threads each. On a CPU."""

    def __init__(self) -> None:
        self._threads = max(torch.get_num_threads() // 2, 1)
        self._other = ThreadPoolExecutor(1, "tandem-lower-layers", self._share)

    def _share(self) -> None:
        torch.set_num_threads(self._threads)

    def run(self, works: Mapping[int, Callable[[], Tensor]]) -> list[Tensor]:
        """See `Pipelines`."""
        first, *others = works.values()
        if not others:
            return [first()]
        before = torch.get_num_threads()
        beside = self._other.submit(torch.inference_mode()(first))
        try:
            torch.set_num_threads(self._threads)
            found = [work() for work in others]
        finally:
            torch.set_num_threads(before)
            first_found = beside.result()
        return [first_found, *found]


class _Row(NamedTuple):
    """A token's row of a pass: of which feed it is, and its number among the feed's tokens."""

    feed: int
    number: int
    token: TokenInFlight


class OverlappedPass:
    """Computes tokens in flight.

    Args:
        backend: whose passes they are, with layers like Llama's.
        compute: its pass.
        exit_: layers behind which the next token is guessed; 0 where the groups are the cycles of a
            model.
        pipelines: that run the groups.

    Attributes:
        groups: that a token goes through. Where more layers are before the exit than behind it, the
            lower ones are two: beside the upper ones a guess goes through as many, and a wrong one
            is waited for no longer than the text's own token.
        exit: groups behind which the next token is guessed.
    """

    def __init__(
        self, backend: Backend, compute: LlamaPass, exit_: int, pipelines: Pipelines
    ) -> None:
        self._backend, self._compute, self._pipelines = backend, compute, pipelines
        layers = len(compute.blocks)
        self._folds = not exit_
        self.groups, self.exit = compute.cycles, 1
        bounds = [0, layers // compute.cycles]
        if exit_:
            bounds = sorted({0, min(layers - exit_, exit_), exit_, layers})
            self.groups, self.exit = len(bounds) - 1, len(bounds) - 2
        self._passes: list[LayerGroup] = [
            compute.group(first, last) for first, last in pairwise(bounds)
        ]

    def forward(self, feeds: Sequence[Feed]) -> PassOutput:
        """Each token of the feeds goes through its next group; the rows of all, in order.

        Raises:
            ValueError: a feed does not fit its extent.
        """
        with self._backend.busy:
            rows = self._begun(feeds)
            by_group: list[list[_Row]] = [[] for _ in range(self.groups)]
            for row in rows:
                by_group[row.token.through].append(row)
            if self._folds:  # the same layers for all
                by_group = [[row for group in by_group for row in group]]
            groups = {i: group for i, group in enumerate(by_group) if group}
            works = {i: self._work(i, group, feeds) for i, group in groups.items()}
            for states, own in zip(self._pipelines.run(works), groups.values(), strict=True):
                for state, row in zip(states.unbind(0), own, strict=True):
                    row.token.states = state
                    row.token.through += 1
            behind = torch.stack([row.token.states for row in rows if row.token.states is not None])
            return PassOutput(self._compute.logits(behind))

    @staticmethod
    def _begun(feeds: Sequence[Feed]) -> list[_Row]:
        """The rows of all feeds, those of new tokens among them."""
        rows: list[_Row] = []
        for i, feed in enumerate(feeds):
            cache, flight, parents = feed.cache, feed.flight or (), feed.parents or ()
            new = len(cache.branches)
            if len(flight) > new:
                cache.grow([one.token_id for one in flight[new:]], parents[new:])
            if cache.used > cache.capacity:
                raise ValueError(f"{cache.used} tokens do not fit an extent of {cache.capacity}")
            rows += [_Row(i, number, token) for number, token in enumerate(flight)]
        return rows

    def _work(
        self, group: int, rows: Sequence[_Row], feeds: Sequence[Feed]
    ) -> Callable[[], Tensor]:
        """What computes rows by a group, [T, E] in their order."""
        pool: KVPool = self._backend.pool
        if self._folds:
            assert pool.folded is not None
            own, stride = pool.folded, pool.stride
        else:
            own, stride = pool.beside(), 0
        packing = Packing([], [], [], [], [])
        for at, row in enumerate(rows):
            _pack(packing, at, row, rows, feeds, stride * row.token.through)
        ids = torch.tensor([row.token.token_id for row in rows])
        backend = self._backend
        ids = ids.to(backend.device, non_blocking=True)
        batch = PackedBatch.packed(packing, ids, backend.in_one_call, backend.windows)
        self._compute.foresee(max(segment.reach for segment in batch.segments))
        states = self._states(rows, ids)
        compute = self._passes[group]
        return lambda: compute(states, batch, own)

    def _states(self, rows: Sequence[_Row], ids: Tensor) -> Tensor:
        """[T, E] what the rows' groups read."""
        parts: list[Tensor] = []
        for row, own in zip(rows, torch.split(ids, 1), strict=True):
            known = row.token.states
            parts.append(self._compute.embedded(own) if known is None else known[None])
        return torch.cat(parts)


def _pack(
    packing: Packing,
    at: int,
    row: _Row,
    rows: Sequence[_Row],
    feeds: Sequence[Feed],
    shift: int,
) -> None:
    """Add a row to a batch. Siblings, which follow each other, share a segment.

    Args:
        packing: of the batch.
        at: the row's number.
        row: to add.
        rows: of the batch.
        feeds: whose they are.
        shift: slots of the pool before those of its cycle.
    """
    cache = feeds[row.feed].cache
    branches, number = cache.branches, row.number
    packing.positions.append(cache.length - 1 + branches.depths[number])
    slot = cache.slots(cache.length + number, 1)[0]
    packing.slots.append(slot + shift)
    before = rows[at - 1] if at else None
    if before is not None and (before.feed, before.token.through) == (row.feed, row.token.through):
        last = packing.segments.pop()
        first, count = last.first, last.count + 1
    else:
        first, count = at, 1
    seen = branches.first(number + 1)
    packing.segments.append(
        Segment(
            first,
            count,
            cache.start + shift,
            cache.length + number + 1,
            None if seen.in_line else seen,
            None,
            cache.skipped,
        )
    )

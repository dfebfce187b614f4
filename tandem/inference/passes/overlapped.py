"""A pass whose rows go through one group of layers each (PPD, Yang et al., arXiv 2307.05908; SPEED,
Hooper et al., arXiv 2310.12072)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tandem.errors import StartupError
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
    """One group after the other."""

    def run(self, works: Mapping[int, Callable[[], Tensor]]) -> list[Tensor]:
        """See `Pipelines`."""
        return [work() for work in works.values()]


ONE_PIPELINE = OnePipeline()


class TwoPipelines:
    """Two groups at the same time, by half of the threads each. On a CPU.

    Args:
        threads: of the process, at least 2.
    """

    def __init__(self, threads: int) -> None:
        # Each keeps its number of threads, which takes long to change.
        lower = threads // 2
        self._workers = [_worker(lower), _worker(threads - lower)]

    def run(self, works: Mapping[int, Callable[[], Tensor]]) -> list[Tensor]:
        """See `Pipelines`. The first group is computed beside the others."""
        if len(works) == 1:
            return [work() for work in works.values()]
        begun = [
            self._workers[min(place, 1)].submit(torch.inference_mode()(work))
            for place, work in enumerate(works.values())
        ]
        wait(begun)  # also where one fails: no other pass may begin before
        return [one.result() for one in begun]


def two_pipelines() -> TwoPipelines:
    """With the threads of this process.

    Raises:
        StartupError: it has one.
    """
    threads = torch.get_num_threads()
    if threads < 2:
        raise StartupError(
            "OVERLAP_PIPELINES: two groups of layers need a thread each; set THREADS to 2 or more"
        )
    return TwoPipelines(threads)


def _worker(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "tandem-layers", lambda: torch.set_num_threads(threads))


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
        exit_: layers after which the next token is guessed; 0 where the groups are the cycles of a
            model.
        pipelines: that run the groups.

    Attributes:
        groups: that a token goes through. Where there are more layers before the exit than after
            it, the layers before it are two groups, of which the first has as many layers as are
            after the exit: a guess goes through that one while its text's token goes through the
            last, and neither waits for the other.
        exit: groups after which the next token is guessed.
    """

    def __init__(
        self, backend: Backend, compute: LlamaPass, exit_: int, pipelines: Pipelines
    ) -> None:
        self._backend, self._compute, self._pipelines = backend, compute, pipelines
        self._no_rows = torch.empty(
            0, backend.vocab_size, dtype=backend.dtype, device=backend.device
        )
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
        """Each token of the feeds goes through its next group; the rows that are wanted, in order.

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
            wanted = [row.token.states for row in rows if row.number < feeds[row.feed].rows]
            if not wanted:
                return PassOutput(self._no_rows)
            return PassOutput(self._compute.logits(torch.stack(wanted)))  # type: ignore[arg-type]

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

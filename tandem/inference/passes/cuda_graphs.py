"""A pass captured as a CUDA graph: one launch, so the device need not wait for each operator's."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog
import torch
from torch import Tensor

from tandem.errors import Unsupported, first_line
from tandem.inference.batch.packed import FedTokens, PackedBatch, Packing
from tandem.inference.batch.segment import Segment
from tandem.inference.batch.tiles import FEW, ONE, WORDS, Tiles, TileSizes
from tandem.inference.check.plain import difference
from tandem.inference.check.texts import ordinary_tokens
from tandem.inference.feed import Feed
from tandem.inference.kv.pool import KVPool
from tandem.inference.output import PassOutput
from tandem.inference.passes.backend import Backend, Pass
from tandem.inference.passes.chains import Chains, Cut
from tandem.kernels import draws
from tandem.speculation.request.sampling import Sampling

_log = structlog.get_logger(__name__)

# Runs before the capture, in which operators choose their kernels and allocate their workspaces.
_WARM_UPS = 2
# Rows for each tile of a size for verifications. One with a tile a row is used where that is too
# few.
_ROWS_A_TILE = 4
# Rows from which on one that is padded costs as much as one that is not.
_BETWEEN = 64
# What the host says of a batch, row by row: the tokens that it knows, their positions and slots,
# the rows whose logits and whose states are wanted, those of drawn tokens, and which these are.
_TOKENS, _POSITIONS, _SLOTS, _ROWS, _STATES, _DRAWN, _AMONG = range(7)
_NUMBERS = 7
# Tokens before the rows that captured passes are compared by, a text each.
_CONTEXTS = (5, 9)
# Rows of a tree of two branches, by their parents, after one more of the trunk.
_TREE = (0, 0, 1, 2, 3)
_ROOM = max(_CONTEXTS) + FEW + 1
# Total variation distance between the rows of a chain and of passes one by one: rounding makes
# hundredths of it, another text's row or another token most of it.
_MOST_APART = 0.2


class Graph:
    """A captured pass of a fixed number of rows, with its own memory that each batch is copied to.

    It takes any batch that fits: chains, trees, a chunk of a prompt beside them. Smaller ones are
    padded: spare rows write to a slot of the pool that no sequence has, and spare tiles have no
    rows.

    Args:
        compute: the pass to capture.
        pool: the keys and values that the graph reads and writes; fixed for its life.
        room: sizes to which batches are padded.
        longest: longest text that it may see, in positions.
        output: [rows or more] for the results, shared with other graphs; None to allocate it.
        device: of all tensors.
        memory: pool for the graph's intermediate results, shared with other graphs.
        states: whether hidden states are among the results, of every row.
        windows: of the layers' attention.
    """

    def __init__(
        self,
        compute: Pass,
        pool: KVPool,
        room: TileSizes,
        longest: int,
        output: PassOutput | None,
        device: torch.device,
        memory: Any,
        states: bool,
        windows: Sequence[int | None],
    ) -> None:
        self.room = room
        self._scratch = pool.scratch
        # A pass may prepare data for all positions up to the longest text.
        segments = [Segment(0, 1, 0, longest)]
        self._tiles = Tiles(segments, device, room, windows, self._numbered())
        # All that the host says of a batch comes by one copy, into this memory.
        self._there = self._tiles.beside.view(_NUMBERS, -1)
        self._batch = PackedBatch(
            segments=segments,
            token_ids=self._there[_TOKENS][None],
            positions=self._there[_POSITIONS][None],
            slots=self._there[_SLOTS],
            rows=None,
            tiles=self._tiles,
            states=torch.arange(room.rows, device=device) if states else None,
        )
        self.output = output or compute(self._batch, pool)

        def run() -> None:
            for kept, found in _pairs(self.output, compute(self._batch, pool)):
                kept[: room.rows].copy_(found)

        self._replay = capture(run, device, memory)

    def __call__(self, packing: Packing, feeds: Sequence[Feed]) -> PassOutput:
        """The rows that the feeds ask for. Their caches do not grow yet."""
        count, fed, there = len(packing.positions), FedTokens.of(feeds), self._there
        numbers = self._numbered()
        numbers[[_TOKENS, _POSITIONS, _SLOTS], :count] = fed.known, packing.positions, packing.slots
        for part, own in (
            (_ROWS, packing.rows),
            (_STATES, packing.states),
            (_DRAWN, fed.slots),
            (_AMONG, fed.indices),
        ):
            numbers[part, : len(own)] = own
        self._tiles.refill(packing.segments, numbers)
        if (step := fed.step) is not None:
            there[_TOKENS, :count].copy_(step)
        elif fed.steps:
            drawn = len(fed.slots)
            fed.fill(there[_TOKENS], there[_DRAWN, :drawn], there[_AMONG, :drawn])
        self._replay()
        logits, kept = self.output.logits, self.output.states
        rows = there[_ROWS, : len(packing.rows)]
        states = there[_STATES, : len(packing.states)] if packing.states else None
        return PassOutput(
            logits[:count].clone() if len(rows) == count else logits.index_select(0, rows),
            None if kept is None or states is None else kept.index_select(0, states),
        )

    def _numbered(self) -> np.ndarray:
        """[_NUMBERS, rows] for a batch of spare rows alone."""
        numbers = np.zeros((_NUMBERS, self.room.rows), np.int64)
        numbers[_SLOTS] = self._scratch
        return numbers


def _pairs(ours: PassOutput, theirs: PassOutput) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits with logits, and states with states where there are some."""
    yield ours.logits, theirs.logits
    if ours.states is not None and theirs.states is not None:
        yield ours.states, theirs.states


def capture(
    run: Callable[[], None],
    device: torch.device,
    memory: Any,
    warm_up: Callable[[], None] | None = None,
) -> Callable[[], None]:
    """Capture `run` as a CUDA graph; returns a function that replays it on the same memory.

    Args:
        run: launches work, and waits for nothing.
        device: of the work.
        memory: from torch.cuda.graph_pool_handle().
        warm_up: launches all kernels of that work, in less time; None for the work itself.

    Raises:
        RuntimeError: `run` waits for the device, or cannot be captured for another reason.
    """
    with torch.cuda.device(device):
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(_WARM_UPS):
                (warm_up or run)()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate meanwhile, such as one that loads a model.
        with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
            run()
    replay: Callable[[], None] = graph.replay
    return replay


class Graphs:
    """Captured passes of several sizes, for small batches: of drafts, of verifications.

    Args:
        compute: the pass to capture.
        pool: as in `Graph`.
        rows: of the largest graph.
        longest: longest text to expect, in positions.
        device: of all tensors.
        states: whether they give hidden states too.
        windows: of the layers' attention.
    """

    def __init__(
        self,
        compute: Pass,
        pool: KVPool,
        rows: int,
        longest: int,
        device: torch.device,
        states: bool = False,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        self._longest = longest
        memory = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        output = None
        self._graphs: list[Graph] = []
        # The largest first, so that the others fit into its memory.
        for room in reversed(rooms(rows)):
            try:
                graph = Graph(
                    compute=compute,
                    pool=pool,
                    room=room,
                    longest=longest,
                    output=output,
                    device=device,
                    memory=memory,
                    states=states,
                    windows=windows,
                )
            except torch.OutOfMemoryError as error:
                if self._graphs or room.rows == 1:
                    raise
                _log.warning(
                    "passes of this size are not captured as CUDA graphs",
                    rows=room.rows,
                    reason=first_line(error),
                )
                continue
            output = graph.output
            self._graphs.insert(0, graph)

    def __iter__(self) -> Iterator[Graph]:
        return iter(self._graphs)

    def fitting(self, feeds: Sequence[Feed]) -> Callable[[Sequence[Feed]], PassOutput] | None:
        """The smallest graph that takes a batch; None if none does, as for long prompts."""
        packing = Packing.of(feeds)
        if max(segment.reach for segment in packing.segments) > self._longest:
            return None
        fits = _fitting(packing)
        graph = next((one for one in self._graphs if fits(one.room)), None)
        return None if graph is None else partial(graph, packing)


def _fitting(packing: Packing) -> Callable[[TileSizes], bool]:
    """Whether a batch fits into sizes."""
    counts = [segment.count for segment in packing.segments]
    behind = max(segment.num_behind for segment in packing.segments)
    rows = sum(counts)
    tiles = {size: sum(-(-count // size) for count in counts) for size in (ONE, FEW)}
    return lambda room: room.fit(rows, tiles[room.size], behind)


def capture_passes(backend: Backend, rows: int, longest: int) -> str:
    """Make a back end compute its small batches by graphs.

    Args:
        backend: attends in one call, and has its final pool.
        rows: of the largest batch.
        longest: longest text to expect, in positions.

    Returns:
        Why that fails; empty where it does not.
    """
    began, before = time.monotonic(), torch.cuda.memory_reserved()
    try:
        states = bool(backend.of_layers)
        graphs = Graphs(
            compute=backend.compute,
            pool=backend.pool,
            rows=rows,
            longest=longest,
            device=backend.device,
            states=states,
            windows=backend.windows,
        )
        _check(backend, graphs)
    except Exception as error:  # a model's own code, and a device's
        return f"{type(error).__name__}: {first_line(error)}"
    backend.graphs = graphs
    _log.info(
        "passes captured as CUDA graphs",
        rows=max(graph.room.rows for graph in graphs),
        sizes=len(list(graphs)),
        seconds=round(time.monotonic() - began, 1),
        mebibytes=(torch.cuda.memory_reserved() - before) >> 20,
    )
    return ""


def capture_chains(backend: Backend, rows: int, longest: int, cut: Cut) -> str:
    """Make a back end with captured passes draw chains by graphs.

    Args:
        backend: has its captured passes, and its final pool.
        rows: of the largest batch.
        longest: longest text to expect, in positions.
        cut: of the distributions that are drawn from.

    Returns:
        Why that fails; empty where it does not, or there are none to capture.
    """
    if backend.graphs is None or not 0 < cut[1] <= draws.WIDEST:
        return ""
    began = time.monotonic()
    memory = torch.cuda.graph_pool_handle() if backend.device.type == "cuda" else None
    try:
        chains = Chains(
            backend,
            rows,
            longest,
            cut,
            lambda run, warm_up: capture(run, backend.device, memory, warm_up),
        )
        _check_chains(backend, chains)
    except Exception as error:  # a model's own code, and a device's
        return f"{type(error).__name__}: {first_line(error)}"
    backend.chains = chains
    _log.info(
        "chains captured as CUDA graphs",
        sizes=len(list(chains)),
        seconds=round(time.monotonic() - began, 1),
    )
    return ""


def _check(backend: Backend, graphs: Graphs) -> None:
    """Compare graphs with the pass itself, for one text and for two.

    Raises:
        Unsupported: a graph gives other rows.
    """
    caches = [cache for cache in (backend.pool.reserve(_ROOM) for _ in _CONTEXTS) if cache]
    try:
        for cache, count in zip(caches, _CONTEXTS, strict=False):
            backend.forward([Feed(cache, ordinary_tokens(backend.vocab_size, count), 0)])
        shapes: list[tuple[int, Sequence[int] | None]] = [(1, None), (3, None), (FEW + 1, None)]
        if backend.takes_trees:
            shapes.append((len(_TREE) + 1, _TREE))
        for (count, parents), texts in itertools.product(shapes, range(1, len(caches) + 1)):
            marks = [cache.mark() for cache in caches]
            states = count if backend.of_layers else 0
            tokens = ordinary_tokens(backend.vocab_size, count, 1)
            feeds = [Feed(cache, tokens, count, parents, states=states) for cache in caches[:texts]]
            packing = Packing.of(feeds)
            fits = _fitting(packing)
            # Every graph that fits, not only the smallest: their kernels differ.
            found = [graph(packing, feeds) for graph in graphs if fits(graph.room)]
            expected = backend.forward(feeds)
            for cache, mark in zip(caches, marks, strict=True):
                cache.return_to(mark)
            apart = max((difference(expected, output) for output in found), default=0.0)
            if not apart <= backend.tolerance:
                raise Unsupported(
                    f"a captured pass differs from the pass itself by {apart:.2g} of its rows'"
                    f" size, where rounding explains {backend.tolerance:.2g}"
                )
    finally:
        for cache in caches:
            backend.pool.release(cache)


def _check_chains(backend: Backend, chains: Chains) -> None:
    """Compare chains with passes and draws one by one, for one text and for two.

    Raises:
        Unsupported: a chain draws from other rows.
    """
    caches = [cache for cache in (backend.pool.reserve(_ROOM) for _ in _CONTEXTS) if cache]
    try:
        for cache, count in zip(caches, _CONTEXTS, strict=False):
            backend.forward([Feed(cache, ordinary_tokens(backend.vocab_size, count), 0)])
        for graph, texts in itertools.product(chains, range(1, len(caches) + 1)):
            if texts > graph.rows:
                continue
            marks, tokens = (
                [cache.mark() for cache in caches],
                [[text + 1] for text in range(texts)],
            )
            asked = _asked(backend.vocab_size, graph.steps, texts)
            feeds = [Feed(cache, own, 1) for cache, own in zip(caches, tokens, strict=False)]
            drawn = graph(feeds, asked)
            for step, rows in enumerate(drawn):
                feeds = [Feed(cache, own, 1) for cache, own in zip(caches, tokens, strict=False)]
                wanted = torch.from_numpy(asked[step]).to(backend.device)
                untaken = torch.empty(texts, 0, dtype=torch.int64, device=backend.device)
                logits = backend.forward(feeds).logits
                expected = draws.draw(logits, wanted, untaken, *chains.cut, 1)
                apart = _apart(rows, expected, backend.vocab_size)
                if not apart <= _MOST_APART:
                    raise Unsupported(f"token {step + 1} of a chain is drawn from another row")
                _, own = draws.parts_of(rows, 1)
                digits = wanted[:, draws.DIGITS :].long()
                if not own.draw(digits).equal(rows[:, 0]):
                    raise Unsupported(f"token {step + 1} of a chain is drawn by another number")
                tokens = rows[:, :1].tolist()
            for cache, mark in zip(caches, marks, strict=True):
                cache.return_to(mark)
    finally:
        for cache in caches:
            backend.pool.release(cache)


def _asked(vocab_size: int, steps: int, texts: int) -> npt.NDArray[np.float64]:
    """What is asked of chains at temperature 1, with some digits."""
    asked = draws.asked_of(range(texts), vocab_size, [Sampling()] * texts, 1)
    each = np.repeat(asked[None], steps, 0)
    each[:, :, draws.DIGITS + 1] = np.linspace(0, 2**32 - 1, steps * texts).reshape(steps, texts)
    return each


def _apart(rows: Tensor, others: Tensor, vocab_size: int) -> float:
    """The largest total variation distance between drawn rows [R, 1 + 2 K] and others."""
    laws = []
    for each in (rows, others):
        ids, weights = each[:, 1:].chunk(2, 1)
        law = torch.zeros(len(each), vocab_size, dtype=torch.float64, device=each.device)
        law.scatter_add_(1, ids, weights.double())
        laws.append(law / law.sum(1, keepdim=True))
    return float((laws[0] - laws[1]).abs().sum(1).max()) / 2


def rooms(rows: int) -> list[TileSizes]:
    """Sizes to capture, smallest first: rows in powers of two, and from 64 on what is between them,
    with a tile for each row (plain decoding, and steps of a draft) or for every fourth
    (verifications, prompts).

    Args:
        rows: most rows.
    """
    found: list[TileSizes] = []
    powers = [1 << n for n in range(rows.bit_length())]
    counts = {*powers, *(3 * count // 2 for count in powers if count >= _BETWEEN)}
    for count in sorted(count for count in counts if count <= rows):
        if count >= _ROWS_A_TILE:
            found.append(TileSizes(count, count // _ROWS_A_TILE, FEW, WORDS))
        found.append(TileSizes(count, count, ONE, WORDS))
    return found

"""A model's pass by OpenVINO's runtime, on a CPU."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import openvino as ov
import structlog
import torch
from torch import Tensor

from tandem.inference.batch.packed import PackedBatch
from tandem.inference.batch.segment import Segment
from tandem.inference.kv.size import free_memory
from tandem.inference.kv.tables import Tables
from tandem.inference.openvino.graph import BATCH_INPUTS, BLOCK, precision_of, widened_once
from tandem.inference.openvino.trace import INPUTS
from tandem.inference.output import PassOutput

_log = structlog.get_logger(__name__)


@cache
def core() -> ov.Core:
    """OpenVINO's runtime, made once and kept.

    Its CPU plugin gives the creating thread a stack for signal handlers, and unmaps that stack when
    the last core is freed, in any thread. The next signal would then end the process with a
    segmentation fault (`SigAltStackSetup` in OpenVINO 2022.2 to 2026.4).
    """
    return ov.Core()


_Array = np.ndarray[Any, Any]
# Of the free memory, what a second compilation may take.
_SHARE = 1 / 16
# Parameters from which it is not worth its memory: a change of sizes is a small part of a pass.
_MOST = 1_000_000_000
# Bytes of it that a log line is worth.
_WORTH_SAYING = 64 << 20
# Up to so many tokens a pass takes longer to read weights of 16 bits than to widen them.
_FEW = 4
# A model with at most so many parameters, such as a drafter, is read from caches. Its single tokens
# stay with the first compilation however many they are: a draft's further passes keep their size.
_SMALL = 64_000_000


class BlockPool(Tables):
    """Keys and values [blocks, heads, 32, head_dim] of every layer, allocated once.

    Args:
        positions: that all sequences may hold together; rounded up to whole blocks.
        caches: the compiled model's inputs for keys and values, in order.
    """

    def __init__(self, positions: int, caches: Sequence[Any]) -> None:
        super().__init__(positions, BLOCK)
        self._caches = caches
        # numpy arrays, for indexing: numpy cannot view OpenVINO's bfloat16 tensors.
        self._raw = [self._allocated(cache) for cache in caches]
        self.tensors = [
            ov.Tensor(raw, list(raw.shape), cache.element_type)
            for raw, cache in zip(self._raw, caches, strict=True)
        ]

    def resized(self, positions: int) -> BlockPool:
        """An empty pool with the same layers."""
        return BlockPool(positions, self._caches)

    @property
    def bytes_per_position(self) -> int:
        """Bytes of one position in all layers."""
        return sum(
            cache.element_type.size * cache.partial_shape[1].get_length() * head_dim
            for cache in self._caches
            for head_dim in (cache.partial_shape[3].get_length(),)
        )

    def move(self, slots: Sequence[int], to: Sequence[int]) -> None:
        """See `PositionPool.move`. All slots are read before any is written."""
        source, target = np.array(slots), np.array(to)
        for raw in self._raw:
            raw[target // BLOCK, :, target % BLOCK] = raw[source // BLOCK, :, source % BLOCK]

    def _allocated(self, cache: Any) -> _Array:
        """A layer's keys or values. Memory is only taken when it is first used."""
        heads, head_dim = (cache.partial_shape[i].get_length() for i in (1, 3))
        shape = [self.positions // BLOCK, heads, BLOCK, head_dim]
        # `zeros` lets the system allocate pages at first use. For bfloat16, which numpy lacks,
        # uint16 is used.
        return np.zeros(shape, np.float32 if cache.element_type.size == 4 else np.uint16)


class OpenVinoPass:
    """A compiled model. Inference only, by one thread at a time.

    A pass whose sizes differ from the last one's takes OpenVINO longer, about 0.1 ms a layer, and
    a draft's first pass has other sizes than its further passes. A model that is small beside the
    free memory is therefore compiled twice: for batches of single tokens, and for other passes.

    In float32 the second compilation has weights of 32 bits where the first widens those of 16 in
    each product: with more than a few tokens that takes longer than reading. A larger model then
    computes batches of more single tokens by the second one too.

    Attributes:
        form: how it is compiled, for `Backend.form`.

    Args:
        graph: from `complete`.
        dtype: of products and of the KV cache: float32 or bfloat16.
        threads: to compute with.
        parameters: of the model.
        layers: of the pool, that its attentions have; None for all. Those of a part of a model,
            which is compiled once.
    """

    def __init__(
        self,
        graph: ov.Model,
        dtype: torch.dtype,
        threads: int,
        parameters: int,
        layers: Sequence[int] | None = None,
    ) -> None:
        self.form, self._most_singles = "", sys.maxsize
        second, widened = graph, 0
        if layers is None and dtype == torch.float32:
            second, widened = widened_once(graph)
        # The constants are there already, but for wide ones; each compilation keeps a copy in its
        # products' own layout.
        further = parameters * precision_of(dtype).size + 4 * widened
        free = free_memory(torch.device("cpu"))
        if layers is not None or parameters > _MOST or further > _SHARE * free:
            self._others = self._singles = _Request(graph, dtype, threads, layers)
            return
        self.form = ", wide" if widened else ", twice"
        if 2 * widened > parameters > _SMALL:
            self._most_singles = _FEW
        self._singles = _Request(graph, dtype, threads)
        self._others = _Request(second, dtype, threads)
        if further >= _WORTH_SAYING:
            _log.info("a pass is compiled twice", mib=further >> 20, wide=widened > 0)

    def pool(self, positions: int) -> BlockPool:
        """An empty KV pool for this model."""
        return BlockPool(positions, self._others.caches)

    def __call__(self, batch: PackedBatch, pool: BlockPool) -> PassOutput:
        """The rows that the batch asks for, in float32; its keys and values are written to the
        pool."""
        tokens = batch.token_ids.shape[1]
        single = tokens == len(batch.segments) and tokens <= self._most_singles
        return (self._singles if single else self._others).infer(batch, pool)


class _Request:
    """A compiled model with its inputs; see `OpenVinoPass`."""

    def __init__(
        self,
        graph: ov.Model,
        dtype: torch.dtype,
        threads: int,
        layers: Sequence[int] | None = None,
    ) -> None:
        precision = precision_of(dtype).to_string()
        self._compiled = core().compile_model(
            graph,
            "CPU",
            {
                "PERFORMANCE_HINT": "LATENCY",
                "INFERENCE_PRECISION_HINT": precision,
                "KV_CACHE_PRECISION": precision,  # 8 bits by default
                "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
                "INFERENCE_NUM_THREADS": threads,
                "ENABLE_HYPER_THREADING": True,  # else it may use fewer threads than it is told to
                # Pinning would tie a drafter and a target on one machine to the same cores.
                "ENABLE_CPU_PINNING": False,
            },
        )
        self._request = self._compiled.create_infer_request()
        self._ports = {port.any_name: i for i, port in enumerate(self._compiled.inputs)}
        self._places = [i for name, i in self._ports.items() if "_cache." in name]
        # Keys and values of a layer follow each other.
        own = range(len(self._places) // 2) if layers is None else layers
        self._tensors = [place for layer in own for place in (2 * layer, 2 * layer + 1)]
        # The arrays after the inputs, kept alive here: OpenVINO's tensors may not do so.
        self._held: dict[str, _Array] = {}
        for name in filter(self._ports.__contains__, (*INPUTS, *BATCH_INPUTS.values())):
            scalar = name == "max_context_len"
            kind = np.int64 if name in INPUTS else np.uint8 if name == "masks" else np.int32
            self._hold(name, np.zeros(int(scalar), kind), scalar)
        self._pool: BlockPool | None = None

    @property
    def caches(self) -> list[Any]:
        """The inputs for keys and values."""
        return [self._compiled.inputs[i] for i in self._places]

    def infer(self, batch: PackedBatch, pool: BlockPool) -> PassOutput:
        """The rows of a batch."""
        if pool is not self._pool:
            for index, place in zip(self._places, self._tensors, strict=True):
                self._request.set_input_tensor(index, pool.tensors[place])
            self._pool = pool
        for name, value in _values(batch).items():
            if name in self._ports:
                self._hand_in(name, value)
        self._request.infer(share_outputs=True)
        return PassOutput(self._result(0), None if batch.states is None else self._result(1))

    def _result(self, number: int) -> Tensor:
        """Copied, since the next pass overwrites it. An output buffer of our own takes longer."""
        return torch.from_numpy(self._request.get_output_tensor(number).data.copy())

    def _hand_in(self, name: str, value: Sequence[int] | _Array) -> None:
        """Set an input; in place if its size is unchanged, since a change of size is expensive."""
        held = self._held[name]
        if len(held) == len(value):
            held[:] = value
        else:
            self._hold(name, np.array(value, held.dtype))

    def _hold(self, name: str, value: _Array, scalar: bool = False) -> None:
        self._held[name] = value
        tensor = ov.Tensor(value.reshape(()) if scalar else value, shared_memory=True)
        self._request.set_input_tensor(self._ports[name], tensor)


def _values(batch: PackedBatch) -> dict[str, Sequence[int] | _Array]:
    """Every input except the pool: tokens, and each sequence's place in the batch and the pool."""
    segments = batch.segments
    counts = [-(-segment.length // BLOCK) for segment in segments]
    blocks: list[int] = []
    for segment, count in zip(segments, counts, strict=True):
        assert segment.table is not None
        blocks += segment.table[:count]
    total = segments[-1].first + segments[-1].count
    masks, mask_begins = _masks(segments)
    return {
        "token_ids": batch.token_ids[0].numpy(),
        "positions": batch.positions[0].numpy(),
        "rows": range(total) if batch.rows is None else batch.rows.numpy(),
        "states": () if batch.states is None else batch.states.numpy(),
        "past_lens": [segment.length - segment.count for segment in segments],
        "subsequence_begins": [*(segment.first for segment in segments), total],
        "block_indices": blocks,
        "block_indices_begins": [0, *accumulate(counts)],
        "max_context_len": [max(segment.length for segment in segments)],
        "masks": masks,
        "mask_begins": mask_begins,
    }


def _masks(segments: Sequence[Segment]) -> tuple[Sequence[int] | _Array, Sequence[int]]:
    """Which of each other the new tokens of each sequence see, and where each sequence's mask
    begins; empty if all are chains."""
    if all(segment.branches is None for segment in segments):
        return (), ()
    masks = [
        np.zeros(0, np.uint8) if segment.branches is None else segment.behind[1].astype(np.uint8)
        for segment in segments
    ]
    begins = [0, *accumulate(mask.size for mask in masks)]
    return np.concatenate([mask.ravel() for mask in masks]), begins

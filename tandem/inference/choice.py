"""Which back end computes a model's pass: by what each can do, and then by measurement."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Sequence
from statistics import median
from typing import Any, Literal

import structlog
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tandem.errors import StartupError, Unsupported, first_line
from tandem.inference.backend import PROBE, PROBE_TOKENS, Backend, Pass, probe
from tandem.inference.cache import KVPool
from tandem.inference.compatibility import cannot_serve, compare, max_positions, plain_logits
from tandem.inference.feed import Feed
from tandem.inference.layout import choose_layout
from tandem.inference.llama import LlamaPass
from tandem.inference.modules import ModulePass
from tandem.inference.record import Record
from tandem.inference.tiles import BLOCK, FEW

_log = structlog.get_logger(__name__)

EngineName = Literal["auto", "torch", "openvino"]
# The probe as often as reaches into a third block of the other back end's cache.
_LONGER = 6
# What is timed: sequences, and the rows of each in passes one after the other. Drafts, whose
# first pass catches up with what was emitted, and verifications; alone and together.
_SHAPES = (
    (1, (3, 1, 1, 1)),
    (1, (5,)),
    (1, (17,)),
    (4, (3, 1, 1, 1)),
    (4, (5,)),
)
_CONTEXT = 64
# Times as large as what a pool is to hold: extents are whole blocks.
_SPARE = 3
_MOST_ROWS = 17
# Texts of the batches for which attention in one call is compiled. It is compiled apart from 128
# rows on, eight small tiles; and where two sizes happen to be equal, which is taken for a law.
_TOGETHER = (3, 9, 10)
# More than four, since blocks are counted in fours (`tiles.py`).
_MANY_BLOCKS = 5
_WARM_UP, _MIN_REPEATS, _MAX_REPEATS = 2, 3, 21
_MEASURING_SECONDS = 0.6


def choose_backend(model: PreTrainedModel, engine: EngineName) -> Backend:
    """The back end of a model, its pool large enough for the probe.

    Args:
        model: in its final dtype, on its device; whichever back end takes its weights.
        engine: `auto` measures; with `openvino`, what that cannot run is one warning and runs
            by torch.

    Raises:
        StartupError: the model computes otherwise in a batch, or cannot be served at all;
            `openvino` was asked for on another device than a CPU.
    """
    cpu = model.device.type == "cpu"
    if engine == "openvino" and not cpu:
        raise StartupError(f"ENGINE=openvino runs on a CPU, not on {model.device.type}")
    text = PROBE * _LONGER if engine != "torch" or not cpu else PROBE
    text = text[: max_positions(model.config.get_text_config())]
    expected = plain_logits(model, text)
    if engine == "torch" or not cpu:
        return _by_torch(model, text, expected)
    return _of_two(model, engine, text, expected)


def _of_two(
    model: PreTrainedModel, engine: EngineName, text: Sequence[int], expected: Tensor
) -> Backend:
    """OpenVINO's back end, if it is asked for or the faster one; else torch's."""
    record = Record(model, torch.get_num_threads())
    gain = record.clear_gain if engine == "auto" else math.inf
    kept = _by_openvino(model, text, expected, record) if gain is None or gain > 1 else None
    if kept is None or gain is None:
        by_torch = _by_torch(model, text, expected)
        if kept is None:
            return by_torch
        gain = _gain(kept, by_torch)
        record.measured(gain)
        if gain <= 1:
            return by_torch
    _forget_weights(model)
    return kept


def _by_torch(model: PreTrainedModel, text: Sequence[int], expected: Tensor) -> Backend:
    """Any model's back end, held to `expected` [n, V] of a text that begins with the probe."""
    device, head = model.device, text[: len(PROBE)]
    try:
        compute = LlamaPass(model) if LlamaPass.fits(model) else ModulePass(model)
        if device.type == "cpu":
            choose_layout(compute)
        backend = Backend("torch", compute, KVPool(PROBE_TOKENS), device)
        found = probe(backend, head)
    except StartupError:
        raise
    except Exception as error:  # a model's own code, whatever it raises
        raise cannot_serve(model, error) from error
    compare(model, expected[: len(head)], found)
    if not _batches(device):
        return backend
    return _in_one_call(model, compute, text, expected) or backend


def _batches(device: torch.device) -> bool:
    """Whether attention of many sequences in one call may be worth its compiler's time."""
    return device.type == "cuda"


def _in_one_call(
    model: PreTrainedModel, compute: Pass, text: Sequence[int], expected: Tensor
) -> Backend | None:
    """A back end whose attention takes all sequences of a batch at once.

    None, and one warning, where that fails: flex attention takes no heads below 16, and needs a
    device that Triton knows.
    """
    try:
        pool = KVPool((_MANY_BLOCKS + 2 * max(_TOGETHER)) * BLOCK, BLOCK)
        backend = Backend("torch", compute, pool, model.device, in_one_call=True)
        for part in (text[: len(PROBE)], text):
            compare(model, expected[: len(part)], probe(backend, part))
        _compile(backend, max_positions(model.config.get_text_config()) - 1)
    except Exception as error:  # of a compiler, which raises what it likes
        reason = f"{type(error).__name__}: {first_line(error)}"
        _log.warning("attention takes one call a text and layer, not one a layer", reason=reason)
        return None
    return backend


def _compile(backend: Backend, at_most: int) -> None:
    """Feed batches of all kinds, so that no later one waits for the compiler: few rows of a text
    and many, few blocks of a text and many, few tiles and many."""
    longest, short = (min(length, at_most) for length in (_MANY_BLOCKS * BLOCK, FEW + 1))
    for count, first in itertools.product(_TOGETHER, (longest, short)):
        lengths = [first] + [short] * (count - 1)
        caches = [backend.pool.reserve(length + 1) for length in lengths]
        for fed in (lengths, [1] * count):
            feeds = [Feed(cache, _tokens(rows), 1) for cache, rows in zip(caches, fed, strict=True)]
            backend.forward(feeds)
        for cache in caches:
            backend.pool.release(cache)


def _by_openvino(
    model: PreTrainedModel, text: Sequence[int], expected: Tensor, record: Record
) -> Backend | None:
    """OpenVINO's back end; None, and one warning, where there is none for this model."""
    if record.crashes:
        _log.warning(
            "OpenVINO seems to end the process with this model, torch computes it",
            remove_to_try_again=str(record.path),
        )
        return None
    record.begin()
    try:
        backend = _converted(model, 2 * _SPARE * len(text))
        compare(model, expected, probe(backend, text))
        record.end()
    except Exception as error:  # not installed, cannot convert: OpenVINO raises what it likes
        reason = f"{type(error).__name__}: {first_line(error)}"
        _log.warning("OpenVINO does not run this model, torch does", reason=reason)
        record.end()
        return None
    return backend


def _converted(model: PreTrainedModel, positions: int) -> Backend:
    if model.dtype not in (torch.float32, torch.bfloat16):
        raise Unsupported(f"OpenVINO's pass in {model.dtype}")
    threads = min(torch.get_num_threads(), len(os.sched_getaffinity(0)))
    if model.dtype == torch.bfloat16 and threads == 1:
        # On a CPU with AMX its fused MLP splits the work of half as many threads: the process
        # would end with a division by zero.
        raise Unsupported("OpenVINO's pass in bfloat16 by one thread")
    # Here, since OpenVINO need not be installed and takes half a second to import.
    from tandem.inference.openvino_graph import complete, precision_of
    from tandem.inference.openvino_pass import OpenVinoPass
    from tandem.inference.openvino_store import kept
    from tandem.inference.openvino_trace import trace, weights_of

    graph = complete(kept(model, trace), weights_of(model), precision_of(model.dtype))
    compute = OpenVinoPass(graph, model.dtype, threads, model.num_parameters())
    return Backend("openvino", compute, compute.pool(positions), model.device)


def _gain(kept: Backend, torch_backend: Backend) -> float:
    """Time of torch's passes over that of OpenVINO's, all shapes alike; taken by turns."""
    backends = (torch_backend, kept)
    pools = [backend.pool for backend in backends]
    try:
        texts = [_begun(backend) for backend in backends]
        gains = {
            f"{count}x{'+'.join(map(str, rows))}": _gain_at(backends, texts, count, rows)
            for count, rows in _SHAPES
        }
    finally:
        for backend, pool in zip(backends, pools, strict=True):
            backend.pool = pool
    gain = math.prod(gains.values()) ** (1 / len(gains))
    rounded = {shape: round(value, 2) for shape, value in gains.items()}
    _log.info("engine", openvino_is_faster_by=rounded, chosen="openvino" if gain > 1 else "torch")
    return gain


def _gain_at(
    backends: Sequence[Backend], texts: Sequence[Sequence[Any]], count: int, rows: Sequence[int]
) -> float:
    """The same for passes of so many rows of `count` texts, again and again: a pass of another
    size than the last one takes OpenVINO longer."""
    spent: tuple[list[float], ...] = tuple([] for _ in backends)
    started = time.perf_counter()
    for repeat in range(_WARM_UP + _MAX_REPEATS):
        for backend, caches, times in zip(backends, texts, spent, strict=True):
            times.append(_timed(backend, caches[:count], rows))
        enough = repeat >= _WARM_UP + _MIN_REPEATS - 1
        if enough and time.perf_counter() - started > _MEASURING_SECONDS / len(_SHAPES):
            break
    ours, theirs = (median(times[_WARM_UP:]) for times in spent)
    return ours / theirs


def _begun(backend: Backend) -> list[Any]:
    """Sequences with some context each, in a pool of their own."""
    count, capacity = max(texts for texts, _ in _SHAPES), _CONTEXT + _MOST_ROWS
    backend.pool = backend.pool.resized(_SPARE * count * capacity)
    caches = [backend.pool.reserve(capacity) for _ in range(count)]
    for cache in caches:
        backend.forward([Feed(cache, _tokens(_CONTEXT), 0)])
    return caches


def _timed(backend: Backend, caches: Sequence[Any], rows: Sequence[int]) -> float:
    """Seconds of passes of some rows of each sequence, which are then forgotten."""
    started = time.perf_counter()
    for count in rows:
        backend.forward([Feed(cache, _tokens(count), count) for cache in caches])
    spent = time.perf_counter() - started
    for cache in caches:
        cache.rollback(_CONTEXT)
    return spent


def _tokens(count: int) -> tuple[int, ...]:
    return (PROBE * (1 + count // len(PROBE)))[:count]


def _forget_weights(model: nn.Module) -> None:
    """Free what the compiled model has copied; the configuration stays."""
    for parameter in model.parameters():
        parameter.data = parameter.data.new_empty(0)

"""The pair: dense random weights, made on the device, and decoders over them.

Both models agree as a real pair does. The residual stream stays the embedding, since what layers
add is tiny. A token's embedding has the code A in both models, and B besides in the target; the
heads have C and D. So the drafter's distribution is softmax(A C), the target's softmax(A C + B D):
at T 1 they overlap by 0.75, and their likeliest tokens agree in 0.72 of the places.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any
from unittest.mock import patch

import structlog
import torch
from structlog.testing import capture_logs
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.gpu.shapes import GRAPH_ROWS, TRUNCATION, Shapes
from tandem.engine.schedule import BatchLimits
from tandem.inference.check import plain
from tandem.inference.decoder import Decoder, DecoderOptions
from tandem.inference.description import describe
from tandem.inference.kv.extents import SequenceCache
from tandem.inference.loading.checkpoint import LoadedCheckpoint
from tandem.inference.passes.backend import Backend
from tandem.inference.passes.cuda_graphs import capture_chains, capture_passes
from tandem.profile import Profile

# Sizes of A C and of B D, for that overlap.
_COMMON, _OWN = 5.0, 0.8
_TINY = 1e-6
# What a layer adds is smaller than the dtype's rounding, so the start's check finds no noise to
# measure by, and would take another kernel's rounding for an error. Rows are checked by
# tests/system/gpu; here their times count.
_LIMIT = 30.0


class LeftOut(Exception):
    """Something does not fit this device, or what it needs was not made."""


class Measured:
    """A decoder, with what its passes must read and compute.

    Attributes:
        name: "target" or "drafter".
        decoder: measured.
        layers: of the model.
        weights: parameters that every pass reads: all but the embedding, of which a row a token is.
        told: of its start, for the JSON file.
    """

    def __init__(self, name: str, decoder: Decoder, shapes: Shapes) -> None:
        config = shapes.target if name == "target" else shapes.drafter
        hidden, heads = config.hidden_size, config.num_attention_heads
        width = getattr(config, "head_dim", None) or hidden // heads
        self.name, self.decoder, self.layers = name, decoder, config.num_hidden_layers
        self.weights = decoder.about.parameters - shapes.vocabulary * hidden
        self.told: dict[str, Any] = {}
        self._head = shapes.vocabulary * hidden
        self._item = shapes.dtype.itemsize
        self._attention = 4 * heads * width * self.layers  # operations a row and position

    @property
    def backend(self) -> Backend:
        """That computes its passes."""
        return self.decoder._backends.current

    @property
    def limits(self) -> BatchLimits:
        """Of an engine's step, as the passes were measured at the start."""
        return BatchLimits(profile=Profile(self.decoder.pass_times))

    def bytes_of(self, texts: int, rows: int, context: int) -> float:
        """What a pass has to read and write."""
        positions = texts * (context + rows)
        return float(self._item * self.weights + positions * self.decoder.pool.bytes_per_position)

    def operations_of(self, texts: int, rows: int, context: int, wanted: int) -> float:
        """What a pass has to compute.

        Args:
            texts: in the pass.
            rows: of each.
            context: tokens before them.
            wanted: rows with logits, of all texts.
        """
        total = texts * rows
        products = 2 * total * (self.weights - self._head) + 2 * wanted * self._head
        return float(products + self._attention * total * (context + rows / 2))

    def capture(self, longest: int) -> None:
        """Capture passes anew, for texts of this length.

        Raises:
            LeftOut: they cannot be captured, and why.
        """
        backend = self.backend
        if backend.device.type != "cuda":
            return
        backend.graphs = backend.chains = None
        gc.collect()
        torch.cuda.empty_cache()
        began = time.perf_counter()
        with torch.inference_mode(), capture_logs():
            why = capture_passes(backend, GRAPH_ROWS, longest)
            if self.name == "drafter":
                capture_chains(backend, GRAPH_ROWS, longest, astuple(TRUNCATION))
        torch.cuda.synchronize()
        self.told[f"captured for {longest}, s"] = time.perf_counter() - began
        self.told["graphs of"] = longest
        if backend.graphs is None:
            raise LeftOut(f"{self.name}: no captured passes for {longest}: {why}")

    @contextmanager
    def texts(self, count: int, context: int, room: int) -> Iterator[list[SequenceCache]]:
        """Texts of random keys and values, for a while.

        Args:
            count: texts.
            context: tokens of each.
            room: for further ones.

        Raises:
            LeftOut: the pool has no room for them.
        """
        caches: list[SequenceCache] = []
        try:
            for _ in range(count):
                cache = self.decoder.reserve(context + room)
                if cache is None:
                    raise LeftOut(f"{self.name}: no room for {count} texts of {context + room}")
                cache.length = context
                caches.append(cache)
            yield caches
        finally:
            for cache in caches:
                self.decoder.release(cache)


def made(name: str, shapes: Shapes) -> PreTrainedModel:
    """The model of that name ("target" or "drafter"), on its device."""
    config = shapes.target if name == "target" else shapes.drafter
    default = torch.get_default_dtype()
    torch.set_default_dtype(shapes.dtype)
    try:
        with torch.device(shapes.device):
            model = AutoModelForCausalLM.from_config(config, dtype=shapes.dtype)
    finally:
        torch.set_default_dtype(default)
    _agree(model, name == "target", shapes)
    quiet: PreTrainedModel = model.eval()
    return quiet


@torch.no_grad()
def _agree(model: Any, target: bool, shapes: Shapes) -> None:
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.normal_(0, _TINY)
        layer.mlp.down_proj.weight.normal_(0, _TINY)
    common, own, behind, own_behind = _codes(shapes)
    embedding, head, width = model.model.embed_tokens.weight, model.lm_head.weight, shapes.code
    embedding.normal_(0, 1)
    head.normal_(0, _TINY)
    embedding[:, :width] = common
    head[:, :width] = behind * (_COMMON / width**0.5)
    if target:
        embedding[:, width : 2 * width] = own
        head[:, width : 2 * width] = own_behind * (_OWN / width**0.5)


def _codes(shapes: Shapes) -> list[Tensor]:
    """A, B, C, D [vocabulary, code]: the same in every process."""
    numbers = torch.Generator(shapes.device).manual_seed(7)
    size = shapes.vocabulary, shapes.code
    return [torch.randn(size, generator=numbers, device=shapes.device) for _ in range(4)]


def checkpoint(name: str, shapes: Shapes) -> LoadedCheckpoint:
    """The model as a service would have read it."""
    model = made(name, shapes)
    return LoadedCheckpoint(model, describe(model, name))


@contextmanager
def lenient() -> Iterator[None]:
    """Have the start's check take random weights."""
    with patch.object(plain, "LIMIT", _LIMIT):
        yield


def start(name: str, shapes: Shapes, positions: int) -> Measured:
    """Make, check, compile, capture and measure a model, as a service does at its start; each step
    is timed.

    Raises:
        StartupError: it cannot be served.
        LeftOut: its passes cannot be captured.
    """
    moments = [_now(shapes)]
    loaded = checkpoint(name, shapes)
    moments.append(_now(shapes))
    with capture_logs() as logs, lenient():
        options = DecoderOptions(cache_tokens=positions, trees=True, engine="torch")
        measured = Measured(name, Decoder(loaded, options), shapes)
        moments.append(_now(shapes))
        measured.capture(shapes.longest)
        captured = _now(shapes)
        measured.decoder.measure(shapes.longest)
    made, ready, compiled = moments
    measured.told |= {
        "weights made, s": ready - made,
        "checked, compiled, pool made, s": compiled - ready,
        "passes measured, s": _now(shapes) - captured,
        "warnings": [str(log) for log in logs if log["log_level"] == "warning"],
    }
    fill(measured)
    return measured


def _now(shapes: Shapes) -> float:
    if shapes.real:
        torch.cuda.synchronize()
    return time.perf_counter()


@torch.inference_mode()
def fill(measured: Measured) -> None:
    """Give the pool random keys and values, so that texts need not be computed."""
    pool = measured.decoder.pool
    for states in (*pool.keys, *pool.values):
        states.normal_(0, 1)


def tokens(count: int, shapes: Shapes, seed: int = 1) -> list[int]:
    """Ids that look like a text."""
    return [(seed * 7919 + 104_729 * place) % (shapes.vocabulary - 1) + 1 for place in range(count)]


def hush() -> None:
    """Let services log warnings alone."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))


def chunks(measured: Measured, beside: Sequence[tuple[int, int]]) -> dict[str, int]:
    """Prompt tokens that a step takes: alone, and beside (texts, rows of each)."""
    limits, found = measured.limits, {"alone": measured.limits.chunk_alone}
    for texts, rows in beside:
        running: Any = [_Running(rows)] * texts
        found[f"beside {texts}x{rows}"] = limits.chunk_beside(running)
    return found


class _Running:
    """Stands for a job of so many tokens."""

    def __init__(self, count: int) -> None:
        self.tokens = count

"""A service's start: weights, check and compilation, capture, measured passes, and the prompt
chunks that follow from these. Makes the pair for all other sections."""

from __future__ import annotations

import time

import torch

from benchmarks.gpu import pair
from benchmarks.gpu.pair import LeftOut, Measured
from benchmarks.gpu.run import Run
from benchmarks.gpu.table import Figure
from benchmarks.gpu.timing import Deadline
from tandem.inference.fingerprint import digest

# Beside weights and pools: logits, what a pass computes on the way, graphs.
_SPARE_BYTES = 6 << 30
# A pool for fewer holds no setting of sixteen texts.
_FEWEST_POSITIONS = 40_000
_FINGERPRINTED = 256 << 20
# Chunks that issue 62 asks for.
_ALONE, _BESIDE = 2048, 150


def measure(run: Run, until: Deadline) -> None:
    """Start the transformers peer beside, then both models."""
    if run.peer:
        fake = () if run.shapes.real else ("--fake",)
        command = ("benchmarks.gpu.transformers_peer", "--out", str(run.scratch), *fake)
        run.spawn("transformers", command)
    found = run.found["start"] = {}
    for name in ("target", "drafter"):

        def one(name: str = name) -> None:
            positions = positions_for(run) if run.shapes.real else run.shapes.positions
            measured = pair.start(name, run.shapes, positions)
            run.pair[name] = measured
            found[name] = _told(run, measured)

        run.attempt(f"start of the {name}", one)
    run.attempt("fingerprint", lambda: _fingerprint(run))


def positions_for(run: Run) -> int:
    """Positions of each pool that the free memory has room for, beside the weights of both models;
    or of the drafter alone, where the target was left out.

    Raises:
        LeftOut: too few.
    """
    shapes = run.shapes
    free, _ = torch.cuda.mem_get_info()
    alone = "start of the target" in run.errors or any(
        one.startswith("start of the target") for one in run.left_out
    )
    configs = (shapes.drafter,) if alone else (shapes.target, shapes.drafter)
    weights, kv = 0, 0
    for config in configs:
        hidden, layers = config.hidden_size, config.num_hidden_layers
        width = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
        own = 2 * config.num_key_value_heads * width
        attention = 2 * hidden * config.num_attention_heads * width + hidden * own
        weights += layers * (attention + 3 * hidden * config.intermediate_size)
        weights += 2 * shapes.vocabulary * hidden
        kv += layers * own
    item = shapes.dtype.itemsize
    used = torch.cuda.memory_allocated()  # of a model that has been started
    room = (free + used - _SPARE_BYTES - item * weights) // (item * kv)
    if room < _FEWEST_POSITIONS:
        need = (_SPARE_BYTES + item * (weights + kv * _FEWEST_POSITIONS)) / 1e9
        raise LeftOut(f"needs {need:.0f} GB of the device's memory, and {free / 1e9:.0f} are free")
    return min(int(room), shapes.positions)


def _told(run: Run, measured: Measured) -> dict[str, object]:
    """Figures of a start, and the rest for the JSON file."""
    line, told, limits = f"start, {measured.name}", measured.told, measured.limits
    real = run.shapes.real
    for step, seconds in list(told.items()):
        if isinstance(seconds, float):
            run.add(Figure(line, step.removesuffix(", s"), seconds, "s"))
    row_us = 1e3 / max(limits.profile.rows_within(1e6, 256), 1e-9)
    run.add(Figure(f"a row, {measured.name}", "more", row_us, "us"))
    bars = {"alone": _ALONE, "beside 16x1": _BESIDE} if real and measured.name == "target" else {}
    for name, tokens in pair.chunks(measured, ((1, 1), (16, 1), (16, 5))).items():
        bar = bars.get(name)
        run.add(Figure(f"prompt chunk, {measured.name}", name, tokens, "", None, bar, True))
    backend = measured.backend
    told |= {
        "pass": type(backend.compute).__name__,
        "in one call": backend.in_one_call,
        "profile, ms": {f"{n}x{rows}": ns / 1e6 for n, rows, ns in measured.decoder.pass_times},
        "parameters": measured.decoder.about.parameters,
        "KV bytes a position": measured.decoder.pool.bytes_per_position,
        "positions": measured.decoder.positions,
    }
    if real:
        told["allocated, GB"] = torch.cuda.memory_allocated() / 1e9
    for warning in told["warnings"]:
        run.say(f"  warning: {warning}")
    return told


def _fingerprint(run: Run) -> None:
    """Weights come home to be hashed, at a service's start."""
    size = _FINGERPRINTED if run.shapes.real else 1 << 20
    tensor = torch.ones(size // run.shapes.dtype.itemsize, device=run.shapes.device)
    tensor = tensor.to(run.shapes.dtype)
    began = time.perf_counter()
    digest(tensor)
    speed = tensor.nbytes / (time.perf_counter() - began)
    run.add(Figure("fingerprint", "one thread", speed / 1e9, "GB/s"))

"""Which back end computes a model's pass: first one that surely works, then the fastest.

At its first start a model is served by torch, while the other ways are made and measured in the
background (`BackendTrial`). The fastest is remembered: the next start begins with it, and measures
again, until two starts of a day have found the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import structlog
import torch
from torch import nn
from transformers import PreTrainedModel

from tandem.errors import StartupError, first_line
from tandem.inference.choice import comparison
from tandem.inference.choice.candidates import (
    OPENVINO_BFLOAT16_THREADS,
    Candidate,
    by_openvino,
    by_torch,
    in_dtype,
    openvino_threads,
)
from tandem.inference.choice.record import StartRecord
from tandem.inference.choice.speed import times_as_slow
from tandem.inference.hidden_states import Layers
from tandem.inference.loading.partial import ModelPart, require_part
from tandem.inference.loading.weights import sharing_weights
from tandem.inference.passes.backend import Backend
from tandem.profile import PassTime

_log = structlog.get_logger(__name__)

# Less is no reason to take twice the memory.
_SLOW = 1.5

EngineName = Literal["auto", "torch", "openvino"]


@dataclass(frozen=True)
class BackendChoice:
    """How a model is computed.

    Attributes:
        backend: serves from now on; its pool is just large enough for the probe.
        trial: of ways that may be faster; None if nothing is left to try.
        for_trees: a second back end for sequences with branches, if `backend` takes none.
        record: of this model on this machine; None on a device.
    """

    backend: Backend
    trial: BackendTrial | None = None
    for_trees: Backend | None = None
    record: StartRecord | None = None


class BackendTrial:
    """Makes back ends that may be faster, and measures them against the serving one.

    Slow; runs once, in any thread.

    Args:
        model: shares its weights with the one that is served.
        ways: to try.
        record: for the result.
        drafts: whether the model drafts.
        of_layers: whose hidden states they give.
        views: parts that they compute too.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        ways: Sequence[Candidate],
        record: StartRecord,
        drafts: bool,
        of_layers: Layers,
        views: Sequence[ModelPart],
    ) -> None:
        self._model = model
        self._ways = ways
        self._record = record
        self._drafts = drafts
        self._of_layers = of_layers
        self._views = views

    @torch.inference_mode()
    def run(self, serving: Backend) -> tuple[Backend, list[PassTime]] | None:
        """A back end that is faster than the serving one, and what its passes take; None if there
        is none."""
        rivals = [serving]
        failed: set[str] = set()
        for way in self._ways:
            if way.engine in failed:
                continue
            try:
                own = in_dtype(self._model, way.dtype)
                rival = _made(way, own, self._record, self._of_layers, self._views)
            except StartupError as error:
                _log.warning("a way to compute this model is left out", reason=first_line(error))
                rival = None
            if rival is None:
                failed.add(way.engine)
            else:
                rivals.append(rival)
        if len(rivals) == 1:
            return None
        found = comparison.compare(rivals, self._drafts)
        best = rivals[found.best]
        self._record.measured(str(best), found.lead if found.sure else 1.0)
        return (best, found.profile) if found.best else None


def choose_backend(
    model: PreTrainedModel,
    engine: EngineName,
    drafts: bool = False,
    trees: bool = False,
    of_layers: Layers = (),
    views: Sequence[ModelPart] = (),
) -> BackendChoice:
    """Choose how a model is computed.

    Args:
        model: on its device, in its dtype; the back end takes over its weights.
        engine: `auto` takes the fastest; with `openvino`, a model that OpenVINO cannot run gives
            one warning and runs by torch.
        drafts: whether the model drafts, which it may do in any dtype; then drafts are compared.
        trees: whether sequences may have branches, which OpenVINO cannot take with sliding windows.
        of_layers: whose hidden states passes give.
        views: parts that compute over the same KV cache; over the same weights by torch alone.

    Raises:
        StartupError: the model gives other logits in a batch, or cannot be served at all;
            or `openvino` was asked for on a device that is not a CPU.
    """
    for part in views:
        require_part(model, part)
    cpu = model.device.type == "cpu"
    if engine == "openvino" and not cpu:
        raise StartupError(f"ENGINE=openvino runs on a CPU, not on {model.device.type}")
    if not cpu:
        return BackendChoice(by_torch(model, of_layers, views))
    # OpenVINO has kernels of its own.
    slower = 1.0 if engine == "openvino" else times_as_slow(model)
    if slower > _SLOW:
        _log.warning(
            f"this CPU computes {str(model.dtype).removeprefix('torch.')} more slowly than float32;"
            " DTYPE=float32 is faster, for twice the memory",
            times_as_slow=round(slower, 1),
        )
    ways = _ways(engine, model.dtype, drafts)
    record = StartRecord(model, torch.get_num_threads(), engine, drafts, *of_layers)
    first = {str(way): way for way in ways}.get(record.best, ways[0])
    others = [] if record.clear else [way for way in ways if way != first]
    rest = sharing_weights(model) if others or trees else None
    served = model if first.dtype == model.dtype else in_dtype(model, first.dtype)
    backend = _made(first, served, record, of_layers, views)
    if backend is None:  # one warning is enough: nothing else is tried
        return BackendChoice(by_torch(model, of_layers, views), record=record)
    for_trees, trial = None, None
    if rest is not None and trees and not backend.takes_trees and backend.engine == "openvino":
        for_trees = by_torch(sharing_weights(rest), of_layers, views)
    if rest is not None and others:
        trial = BackendTrial(rest, others, record, drafts, of_layers, views)
    if backend.engine == "openvino" and for_trees is None and trial is None:
        _forget_weights(model)
    return BackendChoice(backend, trial, for_trees, record)


def like(before: Backend, model: PreTrainedModel, record: StartRecord | None) -> Backend:
    """A back end of the same kind for a model with other weights.

    Args:
        before: that kind.
        model: on the same device.
        record: of the model; None where it is not on a CPU.

    Raises:
        StartupError: it cannot be made.
    """
    if record is None:
        return by_torch(model, before.of_layers)
    way = Candidate(before.engine, before.dtype)
    backend = _made(way, in_dtype(model, way.dtype), record, before.of_layers)
    if backend is None:
        raise StartupError(f"{way} does not compute the new weights")
    return backend


def _ways(engine: EngineName, dtype: torch.dtype, drafts: bool) -> list[Candidate]:
    """Ways to compute a model on a CPU; the first one surely works, or was asked for."""
    engines = ("torch", "openvino") if engine == "auto" else (engine,)
    ways = [Candidate(name, dtype) for name in engines]
    if drafts and torch.cpu._is_avx512_bf16_supported():
        enough = openvino_threads() >= OPENVINO_BFLOAT16_THREADS
        ways += [Candidate(name, torch.bfloat16) for name in engines if name == "torch" or enough]
    return ways


def _made(
    way: Candidate,
    model: PreTrainedModel,
    record: StartRecord,
    of_layers: Layers,
    views: Sequence[ModelPart] = (),
) -> Backend | None:
    """A back end; None, and one warning, if OpenVINO cannot compute this model."""
    if way.engine == "openvino":
        return by_openvino(model, record, of_layers, views)
    return by_torch(model, of_layers, views)


def _forget_weights(model: nn.Module) -> None:
    """Free the weights, which the compiled model has copied; the configuration stays."""
    for parameter in model.parameters():
        parameter.data = parameter.data.new_empty(0)

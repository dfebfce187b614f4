"""The ways to compute a model's pass: each is made, and checked against the model's own logits."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import structlog
import torch
from transformers import PreTrainedModel

from tandem.errors import StartupError, Unsupported, first_line
from tandem.inference.check.plain import Plain, plain_rows
from tandem.inference.check.probe import LONG, SHORT, probe, probe_tree, require_agreement
from tandem.inference.check.texts import ProbeTexts
from tandem.inference.choice.record import StartRecord
from tandem.inference.compatibility import cannot_serve, max_positions, name_of_model
from tandem.inference.hidden_states import Layers
from tandem.inference.kv.pool import KVPool
from tandem.inference.loading.partial import ModelPart, Sublayers, sublayers_of, take_part
from tandem.inference.loading.weights import sharing_weights
from tandem.inference.passes import one_call
from tandem.inference.passes.backend import Backend, Pass, name_of
from tandem.inference.passes.torch_layout import choose_layout
from tandem.inference.passes.torch_llama import LlamaPass
from tandem.inference.passes.torch_modules import ModulePass

_log = structlog.get_logger(__name__)

# A pool is made this many times as large as its content, since extents are whole blocks.
SPARE = 3


# On a CPU with AMX, OpenVINO's fused MLP divides work by half the number of threads: with a single
# thread, the process would crash with a division by zero.
OPENVINO_BFLOAT16_THREADS = 2


class Candidate(NamedTuple):
    """An engine and a precision to compute a pass with."""

    engine: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return name_of(self.engine, self.dtype)


def in_dtype(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy with only its weights in another dtype: rotations keep their precision."""
    if model.dtype == dtype:
        return sharing_weights(model)
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        parameter.data = parameter.data.to(dtype)
    copied.config.dtype = dtype
    return copied


def by_torch(
    model: PreTrainedModel, of_layers: Layers = (), views: Sequence[ModelPart] = ()
) -> Backend:
    """The torch back end of any model; the layout of the weights may change.

    Args:
        model: in its final dtype, on its device.
        of_layers: whose hidden states it gives.
        views: parts that compute over the same weights.

    Raises:
        StartupError: the model gives other logits in a batch, has no such part, or cannot be served
            at all.
    """
    device, dtype = model.device, model.dtype
    parts = {part: sublayers_of(model, part) for part in views}
    together = one_call.worthwhile(device)
    texts = _texts(model, LONG if together else SHORT)
    short = min(SHORT, len(texts.first))
    try:
        # Captured passes cannot be compared layer by layer.
        tolerance = plain_rows(model, texts).logits.tolerance if together else 0.0
        plain = plain_rows(model, texts, of_layers, by_layer=True)
        if not plain.layers:
            _log.info("layers have a form of their own: logits are compared, and no single layer")
        fits = LlamaPass.fits(model)
        compute: LlamaPass | ModulePass
        compute = LlamaPass(model, of_layers) if fits else ModulePass(model, of_layers)
        if device.type == "cpu":
            choose_layout(compute)
        backend = Backend(
            "torch",
            dtype,
            compute,
            KVPool(2 * short, compute.cycles if isinstance(compute, LlamaPass) else 1),
            device,
            _vocab_size(model),
            of_layers=of_layers,
            blocks=tuple(compute.blocks),
        )
        compared = probe(backend, plain, short)
    except StartupError:
        raise
    except Exception as error:  # a model's own code may raise anything
        raise cannot_serve(model, error) from error
    require_agreement(model, compared)
    if together:
        backend = one_call.in_one_call(model, backend, plain) or backend
        backend.tolerance = tolerance
    _try_tree(model, backend, plain)
    if views:
        backend.views = _views(model, compute, parts)
    return backend


def _views(
    model: PreTrainedModel,
    compute: LlamaPass | ModulePass,
    parts: Mapping[ModelPart, Sequence[Sublayers]],
) -> dict[ModelPart, Pass]:
    """Passes of parts over the weights of the whole one's.

    Raises:
        StartupError: it cannot be taken apart.
    """
    if isinstance(compute, ModulePass):
        raise StartupError(
            f"{name_of_model(model)}: no part of it can draft over its own weights, since its"
            " layers are not plain ones; name its checkpoint as the recipe's model, for a copy"
        )
    return {part: compute.part(own, part.exit) for part, own in parts.items()}


def _try_tree(model: PreTrainedModel, backend: Backend, plain: Plain) -> None:
    """Make a back end refuse trees, with one warning, if siblings see each other in it."""
    try:
        compared = probe_tree(backend, plain)
        reason = f"the branches of a tree differ from plain passes: {compared}"
        backend.takes_trees = compared.holds
    except Exception as error:  # a model's own code, and a runtime's
        reason = f"{type(error).__name__}: {first_line(error)}"
        backend.takes_trees = False
    if not backend.takes_trees:
        _log.warning(
            "no trees are taken, only chains",
            model=name_of_model(model),
            engine=str(backend),
            reason=reason,
        )


def by_openvino(
    model: PreTrainedModel,
    record: StartRecord,
    of_layers: Layers = (),
    views: Sequence[ModelPart] = (),
) -> Backend | None:
    """OpenVINO's back end; None, and one warning, if it cannot compute this model.

    Args:
        model: in its final dtype, on a CPU.
        record: of earlier tries.
        of_layers: whose hidden states it gives.
        views: parts that compute over the same KV cache, each by a graph of its own.
    """
    if record.crashes:
        _log.warning(
            "OpenVINO seems to end the process with this model, torch computes it",
            remove_to_try_again=str(record.path),
        )
        return None
    record.begin()
    try:
        texts = _texts(model, LONG)
        length = len(texts.first)
        backend = _converted(model, 2 * SPARE * length, of_layers)
        backend.views = {part: _converted_part(model, part) for part in views}
        # From a copy, since another back end may be using the model's own modules.
        plain = plain_rows(sharing_weights(model), texts, of_layers)
        require_agreement(model, probe(backend, plain, length))
        if backend.takes_trees:
            _try_tree(model, backend, plain)
    except Exception as error:  # not installed, cannot convert: OpenVINO may raise anything
        reason = f"{type(error).__name__}: {first_line(error)}"
        _log.warning("OpenVINO does not run this model, torch does", reason=reason)
        backend = None
    record.end()
    return backend


def _converted_part(model: PreTrainedModel, part: ModelPart) -> Pass:
    """A part of a model, as a graph of its own over the layers of the whole one's pool that it has.
    OpenVINO shares no weights between graphs."""
    from tandem.inference.openvino.graph import complete, precision_of
    from tandem.inference.openvino.paged_pass import OpenVinoPass
    from tandem.inference.openvino.store import kept
    from tandem.inference.openvino.trace import trace, weights_of

    layers = [number for number, own in enumerate(sublayers_of(model, part)) if own.attends]
    own = sharing_weights(model)
    take_part(own, part)
    graph = complete(kept(own, trace, ()), weights_of(own), precision_of(own.dtype))
    return OpenVinoPass(graph, own.dtype, openvino_threads(), own.num_parameters(), layers)


def _texts(model: PreTrainedModel, length: int) -> ProbeTexts:
    """The texts of the probe, cut at the model's longest text."""
    at_most = max_positions(model.config.get_text_config())
    return ProbeTexts.of(_vocab_size(model), min(length, at_most))


def _vocab_size(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config().vocab_size)


def openvino_threads() -> int:
    """OpenVINO's number of threads: torch's, but no more than OpenVINO's own default."""
    return min(torch.get_num_threads(), len(os.sched_getaffinity(0)))


def _converted(model: PreTrainedModel, positions: int, of_layers: Layers) -> Backend:
    if model.dtype not in (torch.float32, torch.bfloat16):
        raise Unsupported(f"OpenVINO's pass in {model.dtype}")
    threads = openvino_threads()
    if model.dtype == torch.bfloat16 and threads < OPENVINO_BFLOAT16_THREADS:
        raise Unsupported("OpenVINO's pass in bfloat16 by one thread")
    # Imported here, since OpenVINO may not be installed and takes half a second to import.
    from tandem.inference.openvino.graph import complete, precision_of, slides
    from tandem.inference.openvino.paged_pass import OpenVinoPass
    from tandem.inference.openvino.store import kept
    from tandem.inference.openvino.trace import trace, weights_of

    structure = kept(model, trace, of_layers)
    cut_by_place = slides(structure)
    graph = complete(structure, weights_of(model), precision_of(model.dtype))
    compute = OpenVinoPass(graph, model.dtype, threads, model.num_parameters())
    pool = compute.pool(positions)
    backend = Backend(
        "openvino",
        model.dtype,
        compute,
        pool,
        model.device,
        _vocab_size(model),
        of_layers=of_layers,
        feeds_again=True,
    )
    # OpenVINO's windows count slots in memory, and siblings take more slots than positions.
    backend.takes_trees = not cut_by_place
    return backend

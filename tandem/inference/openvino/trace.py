"""A model's pass as a graph of OpenVINO, by tracing it once with dummy inputs.

The result is the structure alone. Weights are inputs, so the graph is the same for all checkpoints
of one configuration, and is stored without weights. OpenVINO 2026.4 cannot write paged attention to
a file, so a mark takes its place, with its parameters in the mark's name; `graph.py` adds weights
and attention.
"""

from __future__ import annotations

import contextlib
import json
import threading
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import openvino as ov
import torch
from openvino import opset15 as ops
from openvino._offline_transformations import apply_moc_transformations
from openvino.frontend import FrontEndManager
from openvino.frontend.pytorch import ConversionExtension
from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder
from torch import Tensor, nn
from torch.jit._trace import TracerWarning
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache

from tandem.errors import Unsupported
from tandem.inference.hidden_states import Layers, Tap, stack_states
from tandem.inference.loading.weights import sharing_weights
from tandem.inference.passes.torch_modules import refuse_what_is_unknown

MARK = "tandem_attention"
# The last one where hidden states are given.
INPUTS = ("token_ids", "positions", "rows", "states")
_ATTENTION = "tandem_traced"
# All traces register their attention under one name, and torch traces one model at a time.
_TRACING = threading.Lock()
# Three tokens, two rows: sizes that differ, so that no dimension is mistaken for another.
_EXAMPLE = (torch.tensor([1, 2, 0]), torch.tensor([0, 1, 2]), torch.tensor([1, 2]))
_STATES = torch.tensor([2])


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One layer's attention.

    Attributes:
        query_heads: Hq.
        key_heads: H; divides Hq.
        key_dim: D, of queries too.
        value_dim: Dv.
        scaling: of the scores.
        window: positions that a token sees, its own included; 0 for all.
    """

    query_heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    scaling: float
    window: int


@torch.library.custom_op("tandem::attention", mutates_args=())
def _attention(query: Tensor, key: Tensor, value: Tensor, layer: int) -> Tensor:
    """Replaces attention while a model is traced: zeros in the shape of its output.

    Args:
        query: [T, Hq, 1, D].
        key: [T, H, 1, D].
        value: [T, H, 1, Dv].
        layer: index of the layer in the pass.
    """
    return query.new_zeros(query.shape[0], 1, query.shape[1], value.shape[3])


class _NoCache(Cache):  # type: ignore[misc]
    """Returns a layer's new states unchanged; paged attention will store them."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class _Traced:
    """The model as a function of tokens and weights.

    Each token is a sequence of its own to the model's modules: between heads and tokens there is
    nothing to transpose then, and only attention would know the difference.

    Args:
        model: a private copy; its weights are taken out, and its attention is replaced.
        of_layers: whose hidden states it gives.
    """

    def __init__(self, model: PreTrainedModel, of_layers: Layers) -> None:
        self._model = model
        self._tap = Tap(model, of_layers) if of_layers else None
        self._rows = _EXAMPLE[2]
        head = model.get_output_embeddings()
        if head is None:
            raise Unsupported("a model without an output matrix of its own")
        head.register_forward_pre_hook(self._take_rows)
        self._owners = _without_weights(model)
        # Attention of each layer, found by a first pass that is not traced.
        self.layers: list[AttentionSpec] = []
        self._looking = True
        self._layer = 0
        AttentionInterface.register(_ATTENTION, self._attend)
        model.set_attn_implementation(_ATTENTION)

    def look(self, *inputs: Tensor) -> None:
        """Run once to record each layer's parameters of attention."""
        self(*inputs)
        self._looking = False

    def __call__(self, token_ids: Tensor, positions: Tensor, rows: Tensor, *others: Tensor) -> Any:
        """[R, V] logits of tokens [T] at positions [T], for the rows [R] among them; and [S,
        layers, width] hidden states of the rows [S] that come next, if there is a tap. The weights
        are last."""
        self._layer, self._rows = 0, rows
        weights = others if self._tap is None else others[1:]
        arguments = {
            "input_ids": token_ids[:, None],
            "position_ids": positions[:, None],
            "past_key_values": _NoCache(),
            "use_cache": True,
        }
        for owners, weight in zip(self._owners, weights, strict=True):
            for module, name in owners:
                setattr(module, name, weight)
        logits = self._model(**arguments).logits[:, 0]
        if self._tap is None:
            return logits
        return logits, stack_states([states[:, 0] for states in self._tap.whole()], others[0])

    def _take_rows(self, head: nn.Module, values: tuple[Tensor]) -> tuple[Tensor]:
        """The states [R, 1, width] of which logits are wanted."""
        return (values[0].index_select(0, self._rows),)

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Called by each layer; see `ModulePass`."""
        if self._looking:
            refuse_what_is_unknown(module, sliding_window, kwargs)
            if softcap is not None:
                raise Unsupported("soft caps of attention's scores")
            head_dim = query.shape[3]
            scale = head_dim**-0.5 if scaling is None else float(scaling)
            heads = (query.shape[1], key.shape[1], head_dim, value.shape[3])
            self.layers.append(AttentionSpec(*heads, scale, sliding_window or 0))
        self._layer += 1
        return _attention(query, key, value, self._layer - 1), None


def _structure(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of everything but the weights."""
    copied = sharing_weights(model)
    if hasattr(copied, "set_experts_implementation"):
        with contextlib.suppress(ValueError):  # the model has none
            copied.set_experts_implementation("batched_mm")  # others depend on their data
    for module in copied.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # of gradients alone; its check depends on a traced size
    return copied


def _without_weights(model: PreTrainedModel) -> list[list[tuple[nn.Module, str]]]:
    """Take all parameters out; returns where each was (tied ones have several places)."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {id(p): [] for p in model.parameters()}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                owners[id(parameter)].append((module, name))
                del module._parameters[name]
        for buffer in module._buffers.values():
            if buffer is not None and buffer.is_floating_point():
                buffer.data = buffer.data.float()
    return list(owners.values())


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """A model's parameters by name, tied ones once, in the model's dtype."""
    return {name: weight.detach() for name, weight in model.named_parameters()}


def trace(model: PreTrainedModel, of_layers: Layers = ()) -> ov.Model:
    """The structure of a model's pass.

    Args:
        model: on a CPU; not changed. Its modules are copied, its weights are not.
        of_layers: whose hidden states it gives.

    Returns:
        A graph in float32 from `INPUTS` [T], [T], [R], [S] int64 and the weights, by their names,
        to logits [R, V] and hidden states [S, layers, width]; without [S] and the states where
        there are no layers.

    Raises:
        Exception: the model cannot be traced; from the model, torch or OpenVINO.
    """
    weights = weights_of(model)
    with _TRACING, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations of functions that transformers calls
        warnings.simplefilter("error", TracerWarning)  # raised if the pass depends on its data
        traced = _Traced(_structure(model), of_layers)
        dummies = [torch.zeros(weight.shape) for weight in weights.values()]
        example = (*_EXAMPLE, _STATES) if of_layers else _EXAMPLE
        inputs = (*example, *dummies)
        traced.look(*inputs)
        script = torch.jit.trace(  # type: ignore[no-untyped-call]
            lambda *tensors: traced(*tensors), inputs, check_trace=False
        )
    return _converted(script, inputs, [*INPUTS[: len(example)], *weights], traced.layers)


def _converted(
    script: Any, inputs: tuple[Tensor, ...], names: list[str], layers: list[AttentionSpec]
) -> ov.Model:
    """The traced function as OpenVINO's graph, with its inputs' names."""
    frontend = FrontEndManager().load_by_framework("pytorch")

    def mark(context: Any) -> list[ov.Output]:
        return _mark(context, layers)

    frontend.add_extension(ConversionExtension("tandem::attention", mark))
    decoder = TorchScriptPythonDecoder(script, example_input=inputs, shared_memory=True)
    loaded = frontend.load(decoder)
    for place, name, example in zip(loaded.get_inputs(), names, inputs, strict=True):
        free = name in INPUTS
        loaded.set_partial_shape(place, ov.PartialShape([-1] if free else list(example.shape)))
    graph = frontend.convert(loaded)
    # Transposes around a dimension of 1 become reshapes, and these get constant sizes: OpenVINO
    # cannot compute a size after paged attention, whose own it knows late.
    apply_moc_transformations(graph, cf=False)
    for port, name in zip(graph.inputs, names, strict=True):
        port.get_tensor().set_names({name})
    return graph


def _mark(context: Any, layers: list[AttentionSpec]) -> list[ov.Output]:
    """A placeholder for paged attention, with its inputs, output shape and parameters.

    It joins queries [T, Hq * D], keys [T, H * D] and values [T, H * Dv], and takes the first
    Hq * Dv columns: nothing else in a graph looks like this.
    """
    index = context.get_values_from_const_input(3)
    spec = layers[index]
    widths = (
        spec.query_heads * spec.key_dim,
        spec.key_heads * spec.key_dim,
        spec.key_heads * spec.value_dim,
    )
    flat = [
        ops.reshape(context.get_input(i), np.array([0, width]), special_zero=True)
        for i, width in enumerate(widths)
    ]
    joined = ops.concat(flat, 1)
    joined.set_friendly_name(f"{MARK} {index:05d} {json.dumps(asdict(spec))}")
    shape = np.array([0, 1, spec.query_heads, spec.value_dim])
    taken = ops.slice(
        joined,
        np.array([0]),
        np.array([spec.query_heads * spec.value_dim]),
        np.array([1]),
        np.array([1]),
    )
    return [ops.reshape(taken, shape, special_zero=True).output(0)]

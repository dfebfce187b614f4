"""Completes a traced structure: adds the checkpoint's weights, and paged attention over a KV pool.

The pool's blocks are inputs of the graph and belong to us: we reserve, rewind and free them
without a copy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import openvino as ov
import torch
from openvino import op
from openvino import opset15 as ops
from openvino._offline_transformations import compress_model_transformation
from torch import Tensor

from tandem.errors import Unsupported
from tandem.inference.openvino.trace import INPUTS, MARK, AttentionSpec

# Positions of a block, a constant of the CPU's kernel.
BLOCK = 32
# Inputs of each attention that a batch sets: [B], [B + 1], [blocks], [B + 1] int32, and a scalar;
# then the masks among the new tokens [n, n] of each sequence, flattened, as bytes of 0 and 1, and
# where each begins, [B + 1] int32. A sequence with an empty mask is a chain; if both inputs are
# empty, all sequences are.
BATCH_INPUTS = {
    5: "past_lens",
    6: "subsequence_begins",
    7: "block_indices",
    8: "block_indices_begins",
    12: "max_context_len",
    26: "masks",
    27: "mask_begins",
}
_TYPES = {
    torch.float32: ov.Type.f32,
    torch.bfloat16: ov.Type.bf16,
    torch.float16: ov.Type.f16,
}


def complete(structure: ov.Model, weights: Mapping[str, Tensor], cache_type: ov.Type) -> ov.Model:
    """A graph that can be compiled.

    Args:
        structure: from `trace`; it is changed.
        weights: by name, float32 or bfloat16; they are copied, float32 in 16 bits where these hold
            the same numbers.
        cache_type: of keys and values.

    Returns:
        A graph from `INPUTS`, `BATCH_INPUTS` and key_cache.i and value_cache.i
        [blocks, H, 32, D] of each layer i to logits [R, V] float32, and to hidden states where
        the structure gives some.

    Raises:
        Unsupported: weights differ from those traced, or there is no attention.
    """
    own = [port.get_node() for port in structure.inputs if port.any_name in INPUTS]
    for port in structure.inputs[len(own) :]:
        _put_weight(port, weights)
    shared = {name: _parameter(name, ov.Type.i32, 1) for name in BATCH_INPUTS.values()}
    shared["max_context_len"] = _parameter("max_context_len", ov.Type.i32, 0)
    shared["masks"] = _parameter("masks", ov.Type.u8, 1)
    marks = _marks(structure)
    if not marks:
        raise Unsupported("a graph without attention")
    caches: list[ov.Node] = []
    for layer, joined in enumerate(marks):
        caches += _put_attention(layer, joined, shared, cache_type)
    used = [*own, *shared.values(), *caches]
    return ov.Model(structure.get_results(), used, "tandem")


def widened_once(graph: ov.Model) -> tuple[ov.Model, int]:
    """The same graph, whose weights of 16 bits are widened once, when it is compiled, and kept in
    float32; and how many numbers these are. Until then both graphs share the constants."""
    wide, numbers = graph.clone(), 0
    for node in wide.get_ops():
        if node.get_type_name() != "Convert":
            continue
        for mark in [each for each in node.get_rt_info() if each.startswith("decompression")]:
            del node.get_rt_info()[mark]
            numbers += math.prod(node.input_value(0).get_shape())
    return wide, numbers


def slides(structure: ov.Model) -> bool:
    """Whether some attention has a sliding window."""
    return any(_spec_of(node).window for node in _marks(structure))


def precision_of(dtype: torch.dtype) -> ov.Type:
    """OpenVINO's type for float32 or bfloat16."""
    return _TYPES[dtype]


def _marks(structure: ov.Model) -> list[ov.Node]:
    """The marks where attention belongs, layer by layer."""
    marks = (node for node in structure.get_ops() if node.get_friendly_name().startswith(MARK))
    return sorted(marks, key=lambda node: str(node.get_friendly_name()))


def _spec_of(mark: ov.Node) -> AttentionSpec:
    return AttentionSpec(**json.loads(mark.get_friendly_name().split(" ", 2)[2]))


def _put_weight(port: ov.Output, weights: Mapping[str, Tensor]) -> None:
    """Replace an input by the checkpoint's weight of its name, as float32."""
    weight = weights.get(port.any_name)
    if weight is None or list(weight.shape) != port.partial_shape.to_shape():
        raise Unsupported(f"a weight {port.any_name!r} that is not what was traced")
    weight = _narrow(weight.contiguous())
    raw = weight if weight.dtype == torch.float32 else weight.view(torch.int16)
    tensor = ov.Tensor(raw.numpy(), list(weight.shape), _TYPES[weight.dtype])
    # Copied: the compiled model reads the weights even after the torch model is freed.
    constant: Any = op.Constant(tensor, shared_memory=False)
    if weight.dtype != torch.float32:
        constant = _widened(constant)
    for target in port.get_target_inputs():
        target.replace_source_output(constant.output(0))


def _narrow(weight: Tensor) -> Tensor:
    """A float32 matrix in 16 bits if they hold its numbers, as in most checkpoints; else as it is.
    Its products in float32 are the same, and read half the bytes."""
    if weight.dtype != torch.float32 or weight.dim() < 2:
        return weight
    narrow = (weight.to(dtype) for dtype in (torch.bfloat16, torch.float16))
    return next((own for own in narrow if torch.equal(own.float(), weight)), weight)


def _widened(constant: ov.Node) -> ov.Node:
    """A constant as float32, marked so that the runtime widens it within each product: unmarked,
    it would be widened once, and kept in float32. Python cannot set the mark, but this can."""
    result = ops.result(ops.constant(np.zeros(1, np.float32)))
    compress_model_transformation(ov.Model([result], [], "marked"))
    convert = result.input_value(0).get_node()
    convert.input(0).replace_source_output(constant.output(0))
    convert.validate_and_infer_types()
    return convert


def _put_attention(
    layer: int, joined: ov.Node, shared: Mapping[str, ov.Node], cache_type: ov.Type
) -> list[ov.Node]:
    """Replace a mark by paged attention; returns the parameters of its cache."""
    spec = _spec_of(joined)
    blocks = [
        _parameter(f"{name}_cache.{layer}", cache_type, [-1, spec.key_heads, BLOCK, dim])
        for name, dim in (("key", spec.key_dim), ("value", spec.value_dim))
    ]
    arguments = _no_extras(spec)
    arguments.update({index: shared[name] for index, name in BATCH_INPUTS.items()})
    arguments.update(enumerate([joined.input_value(i) for i in range(3)]))
    arguments.update({3: blocks[0], 4: blocks[1]})
    ordered = [arguments[i] for i in range(len(arguments))]
    attention = op._PagedAttentionExtension(
        [part if isinstance(part, ov.Output) else part.output(0) for part in ordered]
    )
    # The CPU's kernel reads the shapes of the cache from here.
    notes = attention.get_rt_info()
    notes["num_k_heads"] = notes["num_v_heads"] = spec.key_heads
    notes["k_head_size"], notes["v_head_size"] = spec.key_dim, spec.value_dim
    (taken,) = (target.get_node() for target in joined.output(0).get_target_inputs())
    for target in taken.output(0).get_target_inputs():
        target.replace_source_output(attention.output(0))
    return blocks


def _no_extras(spec: AttentionSpec) -> dict[int, ov.Node]:
    """Inputs of OpenVINO 2026.4's attention, by index, that turn off all that we do not use."""
    numbers: dict[int, Any] = {
        9: np.float32(spec.scaling),
        10: np.int32(spec.window),
        18: np.int32(0),  # sparse attention: block size, stride
        19: np.int32(0),
        20: np.zeros((0, 0, 0, 0), np.float32),  # sinks
        21: np.int32(0),  # eviction: start
    }
    for index in (11, 16, 17):  # ALiBi, rotated blocks' angles, sparse attention's threshold
        numbers[index] = np.zeros(0, np.float32)
    for index in (13, 14, 15, 22, 23, 24, 25):  # scores, rotation, eviction, token types
        numbers[index] = np.zeros(0, np.int32)
    return {index: ops.constant(number) for index, number in numbers.items()}


def _parameter(name: str, kind: ov.Type, shape: int | list[int]) -> ov.Node:
    dimensions = [-1] * shape if isinstance(shape, int) else shape
    parameter = ops.parameter(ov.PartialShape(dimensions), kind, name=name)
    parameter.output(0).get_tensor().set_names({name})
    return parameter

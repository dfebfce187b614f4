"""The layout of a model's weights on a CPU, chosen by a short measurement.

A plain linear layer reads its weights once for one row, but takes two to three times as long for
the handful of rows of a verification. With weights packed for oneDNN, both take about the same
time. Which layout is faster depends on the shape, the dtype and the CPU.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import structlog
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

_log = structlog.get_logger(__name__)

# Rows of a draft step, of a verification, and of a few of them together.
_ROWS = (1, 5, 16)
_REPEATS = 7
# Enough layers of one shape to not measure the cache, few enough to start within seconds.
_LAYERS = 4


class PlainLinear(nn.Module):
    """A linear layer as a single matrix product. Inference only.

    Args:
        weight: [out, in].
        bias: [out].
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()
        self._turned = self.weight.t()

    def forward(self, rows: Tensor) -> Tensor:
        """[R, in] to [R, out]."""
        if self.bias is None:
            return rows.mm(self._turned)
        return torch.addmm(self.bias, rows, self._turned)

    def plus(self, addend: Tensor, rows: Tensor) -> Tensor:
        """The layer's output for `rows` [R, in], added to `addend` [R, out] in place."""
        out = addend.addmm_(rows, self._turned)
        return out if self.bias is None else out.add_(self.bias)


class PackedLinear(nn.Module):
    """A linear layer with weights in oneDNN's layout. Inference only, on a CPU.

    Args:
        plain: the layer to pack; its weights are copied.
    """

    def __init__(self, plain: nn.Linear | PlainLinear) -> None:
        super().__init__()
        self._out_features = len(plain.weight)
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach())
        self._bias = None if plain.bias is None else plain.bias.detach()

    def forward(self, rows: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        if rows.numel() == 0:
            return rows.new_empty(*rows.shape[:-1], self._out_features)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._weight, self._bias, "none", [], ""
        )
        return out

    def plus(self, addend: Tensor, rows: Tensor) -> Tensor:
        """The layer's output for `rows` [R, in], plus `addend` [R, out]."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            rows, addend, self._weight, self._bias, "add"
        )
        return out


_Plain = nn.Linear | PlainLinear


def choose_layout(model: nn.Module) -> None:
    """Pack the linear layers that are faster when packed, shape by shape. In place.

    Args:
        model: on a CPU, in its final dtype.
    """
    shapes: dict[torch.Size, list[tuple[nn.Module, str, _Plain]]] = defaultdict(list)
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear or isinstance(child, PlainLinear):
                shapes[child.weight.shape].append((parent, name, child))
    chosen: dict[str, float] = {}
    packed: dict[int, PackedLinear] = {}  # of layers that are used several times
    while shapes:  # shape by shape, so that plain weights are freed once packed
        (out_features, in_features), layers = shapes.popitem()
        gain = _gain([plain for _, _, plain in layers[:_LAYERS]])
        while layers and gain > 1:
            parent, name, plain = layers.pop()
            if id(plain) not in packed:
                packed[id(plain)] = PackedLinear(plain)
            setattr(parent, name, packed[id(plain)])
        chosen[f"{out_features}x{in_features}"] = round(gain, 2)
    _log.info("weight layout", packed_is_faster_by=chosen)


def _gain(layers: Sequence[_Plain]) -> float:
    """Time of the plain layout / time of the packed one (geometric mean over row counts).

    0 if the processor cannot pack them: not all can for float16.
    """
    try:
        packed = [PackedLinear(layer) for layer in layers]
    except RuntimeError:
        return 0.0
    weight = layers[0].weight
    gain = 1.0
    for count in _ROWS:
        rows = torch.randn(count, weight.shape[1], dtype=weight.dtype)
        gain *= _ratio(layers, packed, rows)
    return float(gain ** (1 / len(_ROWS)))


def _run(layers: Sequence[Callable[[Tensor], Tensor]], rows: Tensor) -> None:
    for layer in layers:
        layer(rows)


def _ratio(plain: Sequence[_Plain], packed: Sequence[PackedLinear], rows: Tensor) -> float:
    """Median time of the plain layers / median time of the packed ones, run in turn."""
    by_weights = [partial(linear, weight=layer.weight, bias=layer.bias) for layer in plain]
    layouts: tuple[Sequence[Callable[[Tensor], Tensor]], ...] = (by_weights, packed)
    times: tuple[list[int], list[int]] = ([], [])
    for _ in range(_REPEATS):
        for layers, spent in zip(layouts, times, strict=True):
            started = time.perf_counter_ns()
            _run(layers, rows)
            spent.append(time.perf_counter_ns() - started)
    return float(median(times[0]) / median(times[1]))

"""Both layouts of a linear layer compute what nn.Linear does."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tandem.inference.passes import torch_layout as layout
from tandem.inference.passes.torch_layout import PackedLinear, PlainLinear, choose_layout
from tandem.inference.passes.torch_layout import _ratio as measured_ratio
from tests.support.devices.bfloat16 import can_pack

_CASES = list(product((torch.float32, torch.bfloat16), (True, False), (1, 5)))
# A sum that is rounded once, or twice.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6}


def _linear(bias: bool, dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(24, 40, bias=bias, dtype=dtype)


@pytest.mark.parametrize(("dtype", "bias", "rows"), _CASES)
def test_both_layouts_compute_the_layer(dtype: torch.dtype, bias: bool, rows: int) -> None:
    plain, tolerance = _linear(bias, dtype), _TOLERANCE[dtype]
    states, addend = torch.randn(rows, 24, dtype=dtype), torch.randn(rows, 40, dtype=dtype)
    layers: list[PlainLinear | PackedLinear] = [PlainLinear(plain.weight, plain.bias)]
    if dtype == torch.float32 or can_pack():
        layers.append(PackedLinear(plain))
    with torch.inference_mode():
        expected = plain(states)
        for layer in layers:
            assert_close(layer(states), expected, atol=tolerance, rtol=tolerance)
            assert_close(
                layer.plus(addend.clone(), states),
                expected + addend,
                atol=tolerance,
                rtol=tolerance,
            )
            assert layer(states[:0]).shape == (0, 40)


def test_what_cannot_be_packed_stays_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """float16 without its units, say."""

    def refuse(self: PackedLinear, plain: nn.Linear) -> None:
        raise RuntimeError("fp16 path needs the cpu support avx_ne_convert or avx512_fp16")

    monkeypatch.setattr(PackedLinear, "__init__", refuse)
    plain = _linear(True, torch.float32)
    model = nn.Sequential(plain)
    choose_layout(model)
    assert model[0] is plain


def test_both_layouts_are_timed() -> None:
    """Here alone: all other tests have a layout by the size of the weights."""
    plain, rows = _linear(True, torch.float32), torch.randn(5, 24)
    assert layout._ratio is not measured_ratio
    with torch.inference_mode():
        assert measured_ratio([plain], [PackedLinear(plain)], rows) > 0


@pytest.mark.parametrize("gain", [2.0, 0.5])
def test_the_faster_layout_is_taken(gain: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "_gain", lambda layers: gain)
    plain = _linear(True, torch.float32)
    model = nn.Sequential(plain, nn.ReLU(), PlainLinear(torch.randn(8, 40)))
    states = torch.randn(3, 24)
    with torch.inference_mode():
        expected = model(states)
        choose_layout(model)
        packed = [isinstance(model[place], PackedLinear) for place in (0, 2)]
        assert packed == [gain > 1] * 2
        assert_close(model(states), expected)

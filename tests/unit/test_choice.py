"""Which pass a model gets, and what becomes of one that OpenVINO cannot have."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.errors import StartupError
from tandem.inference import choice
from tandem.inference.decoder import Decoder
from tests.architectures import LLAMA, SUPPORTED, build
from tests.parity import (
    TOLERANCE,
    differences,
    load,
    plain_logits,
    ragged_logits,
    random_texts,
)
from tests.tiny import random_llama

pytest.importorskip("openvino")
from openvino import opset15 as ops

from tandem.inference import openvino_graph
from tandem.inference.openvino_pass import OpenVinoPass


def test_what_it_cannot_do_is_one_warning_and_the_torch_pass() -> None:
    row = next(row for row in SUPPORTED if row.model_type == "gemma2")
    texts = random_texts()
    expected = plain_logits(build(row), texts)
    decoder, warnings = load(build(row))
    assert decoder.engine == "torch"
    assert warnings == ["Unsupported: soft caps of attention's scores"]
    assert differences(expected, ragged_logits(decoder, texts)).max() < TOLERANCE


def not_installed(patch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.startswith(("openvino", "tandem.inference.openvino")):
            patch.delitem(sys.modules, name)
    patch.setitem(sys.modules, "openvino", None)


def another_scale(patch: pytest.MonkeyPatch) -> None:
    right = openvino_graph._no_extras

    def wrong(spec: Any) -> Any:
        arguments = right(spec)
        arguments[9] = ops.constant(np.float32(2 * spec.scaling))
        return arguments

    patch.setattr(openvino_graph, "_no_extras", wrong)


def blocks_of_others(patch: pytest.MonkeyPatch) -> None:
    from tandem.inference import openvino_pass

    right = openvino_pass._values

    def wrong(batch: Any) -> Any:
        values = right(batch)
        values["block_indices"] = [0] * len(values["block_indices"])
        return values

    patch.setattr(openvino_pass, "_values", wrong)


def stale_rollbacks(patch: pytest.MonkeyPatch) -> None:
    from tandem.inference import openvino_pass

    right = openvino_pass._values

    def wrong(batch: Any) -> Any:
        values = right(batch)
        values["past_lens"] = [length + (length > 2) for length in values["past_lens"]]
        return values

    patch.setattr(openvino_pass, "_values", wrong)


def no_compiler(patch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such primitive\nand a page of others")

    patch.setattr(OpenVinoPass, "__init__", fail)


@pytest.mark.parametrize("engine", ["auto", "openvino"])
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (not_installed, "openvino"),
        (another_scale, "differs from a plain pass"),
        (blocks_of_others, "differs from a plain pass"),
        (stale_rollbacks, ""),
        (no_compiler, "RuntimeError: no such primitive"),
    ],
)
def test_whatever_fails_is_one_warning_and_the_torch_pass(
    fault: Callable[[pytest.MonkeyPatch], None],
    reason: str,
    engine: choice.EngineName,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch)
    decoder, (warning,) = load(build(LLAMA), engine)
    assert decoder.engine == "torch"
    assert reason in warning
    assert "\n" not in warning


@pytest.mark.parametrize(
    ("dtype", "reason"),
    [(torch.float16, "in torch.float16"), (torch.bfloat16, "in bfloat16 by one thread")],
)
def test_what_would_crash_is_left_to_torch(dtype: torch.dtype, reason: str) -> None:
    """The tests run in one thread."""
    decoder, warnings = load(random_llama(1).to(dtype), "auto")
    assert decoder.engine == "torch"
    assert warnings == [f"Unsupported: OpenVINO's pass {reason}"]


def test_on_another_device_it_is_refused() -> None:
    with pytest.raises(StartupError, match="ENGINE=openvino runs on a CPU, not on meta"):
        choice.choose_backend(random_llama(1).to("meta"), "openvino")


@pytest.mark.parametrize(("gain", "engine"), [(1.5, "openvino"), (0.9, "torch")])
@pytest.mark.usefixtures("empty_cache")
def test_the_faster_one_is_taken(gain: float, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either then gives the plain logits: the other one has left it its weights."""
    monkeypatch.setattr(choice, "_gain", lambda *_: gain)
    texts = random_texts()
    expected = plain_logits(build(LLAMA), texts)
    decoder = Decoder(build(LLAMA), "tiny", cache_tokens=512, engine="auto")
    assert decoder.engine == engine
    assert differences(expected, ragged_logits(decoder, texts)).max() < TOLERANCE


@pytest.mark.usefixtures("empty_cache")
def test_the_measurement_sees_a_slow_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    right = OpenVinoPass.__call__

    def slow(self: OpenVinoPass, *args: Any) -> Tensor:
        for _ in range(20):
            right(self, *args)
        return right(self, *args)

    monkeypatch.setattr(choice, "_MEASURING_SECONDS", 0.05)
    monkeypatch.setattr(OpenVinoPass, "__call__", slow)
    decoder = Decoder(build(LLAMA), "tiny", engine="auto")
    assert decoder.engine == "torch"
    assert decoder.forward_passes == decoder.fed_tokens == 0

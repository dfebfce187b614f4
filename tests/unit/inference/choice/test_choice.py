"""Which pass a model gets, and what happens to a model that OpenVINO cannot run."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from tandem.errors import StartupError
from tandem.inference import decoder as decoder_module
from tandem.inference.choice import choose as choice
from tandem.inference.choice import comparison
from tandem.inference.feed import Feed
from tandem.inference.passes.backend import Backend
from tests.support.decoders import decoder_over
from tests.support.devices.bfloat16 import needs_units
from tests.support.models.architectures import SMALL, SUPPORTED, build
from tests.support.models.parity import (
    TOLERANCE,
    differences,
    load,
    plain_logits,
    ragged_logits,
    random_texts,
)
from tests.support.models.tiny import random_llama

pytest.importorskip("openvino")
from openvino import opset15 as ops

from tandem.inference.openvino import graph as openvino_graph
from tandem.inference.openvino.paged_pass import OpenVinoPass
from tandem.inference.output import PassOutput

pytestmark = pytest.mark.usefixtures("compiled_once")

Fault = Callable[[pytest.MonkeyPatch], None]


def test_what_it_cannot_do_is_one_warning_and_the_torch_pass() -> None:
    row = next(row for row in SUPPORTED if row.model_type == "gemma2")
    texts = random_texts()
    expected = plain_logits(build(row), texts)
    decoder, warnings = load(build(row))
    assert decoder.engine == "torch"
    assert warnings == ["Unsupported: soft caps of attention's scores"]
    assert differences(expected, ragged_logits(decoder, texts)).max() < TOLERANCE


def test_a_padding_token_is_no_obstacle() -> None:
    """Most published models have one; the embedding's own check of it cannot be traced."""
    decoder, warnings = load(build(SMALL, pad_token_id=2))
    assert (decoder.engine, warnings) == ("openvino", [])


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


def another_input(name: str, change: Callable[[list[int]], list[int]]) -> Fault:
    """Of a batch, handed to OpenVINO."""

    def fault(patch: pytest.MonkeyPatch) -> None:
        from tandem.inference.openvino import paged_pass as openvino_pass

        right = openvino_pass._values

        def wrong(batch: Any) -> Any:
            values: dict[str, Any] = dict(right(batch))
            return values | {name: change(values[name])}

        patch.setattr(openvino_pass, "_values", wrong)

    return fault


blocks_of_others = another_input("block_indices", lambda blocks: [0] * len(blocks))
stale_rollbacks = another_input("past_lens", lambda lens: [n + (n > 2) for n in lens])


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
    fault: Fault,
    reason: str,
    engine: choice.EngineName,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch)
    decoder, (warning,) = load(build(SMALL), engine)
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


def pass_times(factors: dict[str, float]) -> Callable[..., float]:
    """A clock by which a pass takes 1 ms and each row 0.1 ms more, times the factors of its back
    end's engine and dtype."""

    def timed(backend: Backend, caches: Sequence[Any], rows: Sequence[int], *_: Any) -> float:
        named = str(backend).split()
        factor = math.prod(each for name, each in factors.items() if name in named)
        return factor * (1e-3 + 1e-4 * len(caches) * sum(rows))

    return timed


@pytest.mark.parametrize(("gain", "engine"), [(1.5, "openvino"), (1.03, "torch"), (0.9, "torch")])
@pytest.mark.usefixtures("empty_cache")
def test_the_faster_one_is_taken(gain: float, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "timed", pass_times({"openvino": 1 / gain}))
    texts = random_texts()
    expected = plain_logits(build(SMALL), texts)
    decoder = decoder_over(build(SMALL), "tiny", cache_tokens=512, engine="auto")
    decoder.measure(64)
    of_torch = decoder.pass_times
    assert (decoder.engine, decoder.improving) == ("torch", True), "it serves at once"
    decoder.improve()
    assert (decoder.engine, decoder.improving) == (engine, False)
    changed = engine != "torch"
    assert (decoder.pass_times != of_torch) == changed
    if changed:
        assert decoder.pass_times[0][2] == pytest.approx(1.1e6 / gain)
    assert differences(expected, ragged_logits(decoder, texts)).max() < TOLERANCE


@pytest.mark.usefixtures("empty_cache")
def test_the_measurement_sees_a_slow_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    right = OpenVinoPass.__call__

    def slow(self: OpenVinoPass, *args: Any) -> PassOutput:
        for _ in range(20):
            right(self, *args)
        return right(self, *args)

    monkeypatch.setattr(OpenVinoPass, "__call__", slow)
    decoder, _ = load(build(SMALL), "auto")
    assert decoder.engine == "torch"
    assert decoder.forward_passes == decoder.fed_tokens == 0


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO's pass is faster than torch's, and bfloat16 than float32."""
    monkeypatch.setattr(comparison, "timed", pass_times({"openvino": 0.7, "bfloat16": 0.5}))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


@pytest.mark.usefixtures("empty_cache", "faster")
@pytest.mark.parametrize("model_type", ["llama", "gpt_neox"])
@torch.inference_mode()
def test_a_sequence_stays_where_it_began(model_type: str) -> None:
    """Beside later ones, in one batch with them; then nothing is left of the first back end."""
    row = next(row for row in SUPPORTED if row.model_type == model_type)
    text = random_texts()[-1]
    (expected,) = plain_logits(build(row), [text])
    decoder = decoder_over(build(row), "tiny", cache_tokens=128, engine="auto")
    first, (earlier,) = decoder.reserve(64), decoder._backends._all
    assert first is not None
    decoder.forward([Feed(first, text[:10], 0)])
    decoder.improve()
    assert decoder.engine == "openvino"
    later = decoder.reserve(64)
    assert later is not None
    assert first.pool is earlier.pool is not later.pool
    decoder.forward([Feed(later, text[:20], 0)])
    found = decoder.forward([Feed(first, text[10:20], 3), Feed(later, text[20:], 5)]).logits
    assert torch.allclose(found, torch.cat((expected[17:20], expected[-5:])), atol=TOLERANCE)
    found = decoder.forward([Feed(first, text[20:], 2)]).logits
    assert torch.allclose(found, expected[-2:], atol=TOLERANCE)
    decoder.release(first)
    assert decoder._backends._all == (decoder._backends.current,)
    decoder.release(later)
    assert decoder.pool.free_positions == decoder.positions


@pytest.mark.usefixtures("empty_cache", "faster")
@pytest.mark.parametrize("engine", ["auto", "torch", pytest.param("openvino", marks=needs_units)])
def test_a_drafter_takes_the_fastest_dtype(
    engine: choice.EngineName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    decoder = decoder_over(build(SMALL), "tiny", cache_tokens=512, engine=engine, drafts=True)
    assert decoder.dtype == "float32"
    decoder.improve()
    assert decoder.dtype == "bfloat16"
    texts = random_texts()
    expected = plain_logits(build(SMALL), texts)
    rounding = differences(expected, ragged_logits(decoder, texts)).mean()
    assert 0 < rounding < 0.1 * torch.cat(expected).std()
    for improving in (True, False):
        again = decoder_over(build(SMALL), "tiny", cache_tokens=512, engine=engine, drafts=True)
        assert (again.dtype, again.engine) == ("bfloat16", decoder.engine), "it is remembered"
        assert again.improving == improving, "two starts must agree"
        again.improve()


@pytest.mark.usefixtures("empty_cache", "faster")
def test_without_bfloat16_units_no_other_dtype_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    decoder = decoder_over(build(SMALL), "tiny", cache_tokens=512, engine="torch", drafts=True)
    assert not decoder.improving


@pytest.mark.usefixtures("empty_cache")
def test_a_small_drafter_is_not_warned_of_what_its_one_thread_cannot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    with capture_logs() as logs:
        decoder_over(build(SMALL), "tiny", cache_tokens=512, engine="auto", drafts=True).improve()
    assert not [line for line in logs if line["log_level"] == "warning"]


@pytest.mark.usefixtures("empty_cache", "faster")
@pytest.mark.parametrize("fault", ["measurement", "memory"])
def test_a_trial_that_fails_leaves_what_serves(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "measurement":
        monkeypatch.setattr(comparison, "costs_of", None)
    else:
        monkeypatch.setattr(decoder_module, "memory_left", lambda *_: 0)
    decoder, (_,) = load(build(SMALL), "auto")
    assert (decoder.engine, decoder.improving) == ("torch", False)
    texts = random_texts()
    found = ragged_logits(decoder, texts)
    assert differences(plain_logits(build(SMALL), texts), found).max() < TOLERANCE


@pytest.mark.usefixtures("empty_cache", "faster")
def test_a_faster_way_serves_where_the_pool_has_all_of_its_half_of_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pool takes memory as it is used, and texts have hardly begun to use the first one."""
    decoder = decoder_over(build(SMALL), "tiny", cache_tokens=512, engine="auto")
    pool = 512 * decoder.backend.pool.bytes_per_position
    monkeypatch.setattr(decoder_module, "memory_left", lambda *_: pool)
    decoder.improve()
    assert (decoder.engine, decoder.improving) == ("openvino", False)


@pytest.mark.usefixtures("empty_cache")
def test_it_serves_while_it_is_tried() -> None:
    texts = random_texts()
    expected = plain_logits(build(SMALL), texts)
    decoder = decoder_over(build(SMALL), "tiny", cache_tokens=512, engine="auto")
    trial = threading.Thread(target=decoder.improve)
    trial.start()
    rounds = 0
    while trial.is_alive() or rounds < 2:
        assert differences(expected, ragged_logits(decoder, texts)).max() < TOLERANCE
        rounds += 1
    trial.join()
    assert not decoder.improving

"""At the start a device gets one-call attention, if that compiles and gives the plain logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from tandem.inference.batch import flex
from tandem.inference.batch.tiles import FEW, MANY, Tiles
from tandem.inference.decoder import Decoder
from tandem.inference.feed import Feed
from tandem.inference.passes import one_call
from tests.support.devices.flex import BLOCK, as_a_device_reads, without_compiler
from tests.support.models.architectures import LLAMA, SUPPORTED, Architecture, build
from tests.support.models.parity import TOLERANCE, worst_difference


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    without_compiler(monkeypatch)
    monkeypatch.setattr(one_call, "worthwhile", lambda _: True)


def test_what_a_former_holder_left_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text whose numbers were not finite must not reach whoever has its extent next."""
    monkeypatch.setattr(flex, "flex_attention", as_a_device_reads)
    decoder = Decoder(build(LLAMA), "tiny", cache_tokens=4 * BLOCK)
    caches = [decoder.reserve(BLOCK) for _ in range(2)]
    feeds = [Feed(cache, [1, 2, 3], 3) for cache in caches if cache is not None]
    with torch.inference_mode():
        for states in (*decoder.pool.keys, *decoder.pool.values):
            assert states.isfinite().all(), "a new pool"
            states.fill_(torch.nan)
        assert decoder.forward(feeds).isfinite().all()


NAMES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt2", "gpt_bigcode")
# Torch's own operators, which are slow: plain lists and modules, windows, soft caps, one key head.
OWN = ("llama", "gemma2", "gpt_bigcode")


@pytest.mark.parametrize(
    ("kernel", "row"),
    [
        pytest.param(kernel, row, id=f"{kernel.__name__}-{row.model_type}")
        for kernel, names in ((flex_attention, OWN), (as_a_device_reads, NAMES))
        for row in SUPPORTED
        if row.model_type in names
    ],
)
def test_architectures_give_the_plain_logits(
    row: Architecture, kernel: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def counting(*args: Any, **options: Any) -> Any:
        calls.append(len(args))
        return kernel(*args, **options)

    monkeypatch.setattr(flex, "flex_attention", counting)
    assert worst_difference(row) < TOLERANCE
    assert len(calls) > 20


def test_what_does_not_compile_is_one_warning_and_one_call_a_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any, **__: Any) -> None:  # as torch does for heads that are too small
        raise NotImplementedError("NYI: at least 16\nand a page of others")

    monkeypatch.setattr(flex, "flex_attention", refuse)
    with capture_logs() as logs:
        assert worst_difference(LLAMA) < TOLERANCE
    (warning,) = [line for line in logs if line["log_level"] == "warning"]
    assert warning["reason"] == "NotImplementedError: NYI: at least 16"


def test_what_computes_otherwise_is_one_warning_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any, **options: Any) -> Any:
        return 2 * flex_attention(*args, **options)

    monkeypatch.setattr(flex, "flex_attention", wrong)
    with capture_logs() as logs:
        assert worst_difference(LLAMA) < TOLERANCE
    (warning,) = [line for line in logs if line["log_level"] == "warning"]
    assert "a ragged batch differs from a plain pass" in warning["reason"]


def test_the_start_feeds_what_is_compiled_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the size of a tile, from 128 rows on, and for more than one number of blocks."""
    kinds = set()
    making = Tiles.mask

    def noting(self: Tiles, *args: Any) -> BlockMask:
        mask = making(self, *args)
        kinds.add((self.size, len(self.rows) >= 128, mask.kv_indices.shape[-1] > 4))
        return mask

    monkeypatch.setattr(Tiles, "mask", noting)
    Decoder(build(LLAMA), "tiny", cache_tokens=BLOCK)
    of_few = {(FEW, many_rows, many) for many_rows in (False, True) for many in (False, True)}
    assert kinds == of_few | {(MANY, True, False), (MANY, True, True)}

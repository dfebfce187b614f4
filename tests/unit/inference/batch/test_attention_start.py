"""At the start a device gets one-call attention, if that compiles and gives the plain logits."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from triton.runtime.errors import OutOfResources

from tandem.inference.batch import flex
from tandem.inference.batch.tiles import FEW, MANY, Tiles
from tandem.inference.check.plain import difference
from tandem.inference.check.texts import ordinary_tokens
from tandem.inference.feed import Feed
from tandem.inference.output import PassOutput
from tandem.inference.passes import one_call
from tests.support.decoders import decoder_over
from tests.support.devices.flex import BLOCK, as_a_device_reads, without_compiler
from tests.support.models.architectures import (
    SMALL,
    SUPPORTED,
    VOCAB_SIZE,
    Architecture,
    build,
    one_layer,
)
from tests.support.models.parity import TOLERANCE, plain_logits, worst_difference


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    without_compiler(monkeypatch)
    monkeypatch.setattr(one_call, "worthwhile", lambda _: True)


def test_what_a_former_holder_left_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text whose numbers were not finite must not reach whoever has its extent next."""
    monkeypatch.setattr(flex, "flex_attention", as_a_device_reads)
    decoder = decoder_over(build(SMALL), "tiny", cache_tokens=4 * BLOCK)
    caches = [decoder.reserve(BLOCK) for _ in range(2)]
    feeds = [Feed(cache, [1, 2, 3], 3) for cache in caches if cache is not None]
    with torch.inference_mode():
        for states in (*decoder.pool.keys, *decoder.pool.values):
            assert states.isfinite().all(), "a new pool"
            states.fill_(torch.nan)
        assert decoder.forward(feeds).logits.isfinite().all()


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
    assert worst_difference(one_layer(row)) < TOLERANCE
    assert len(calls) > 20


def test_what_does_not_compile_is_one_warning_and_one_call_a_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any, **__: Any) -> None:  # as torch does for heads that are too small
        raise NotImplementedError("NYI: at least 16\nand a page of others")

    monkeypatch.setattr(flex, "flex_attention", refuse)
    with capture_logs() as logs:
        assert worst_difference(SMALL) < TOLERANCE
    (warning,) = [line for line in logs if line["log_level"] == "warning"]
    assert warning["reason"] == "NotImplementedError: NYI: at least 16"


def test_what_computes_otherwise_is_one_warning_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any, **options: Any) -> Any:
        return 2 * flex_attention(*args, **options)

    monkeypatch.setattr(flex, "flex_attention", wrong)
    with capture_logs() as logs:
        assert worst_difference(SMALL) < TOLERANCE
    (warning,) = [line for line in logs if line["log_level"] == "warning"]
    assert "a ragged batch differs from a plain pass" in warning["reason"]


def test_what_does_not_fit_into_shared_memory_is_one_warning_and_one_call_a_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Heads of 256 in float32, on a card with 99 KiB a block: the first tiles, which are small, are
    computed, and larger ones are refused as Triton does it."""
    rows_computed = set()

    def on_a_small_card(query: Tensor, *states: Tensor, **options: Any) -> Tensor:
        rows = options["kernel_options"]["BLOCK_M"]
        if rows * query.shape[-1] * query.element_size() > 99 * 1024 // 2:
            raise OutOfResources(128 * 1024, 99 * 1024, "shared memory")
        rows_computed.add(rows)
        return as_a_device_reads(query, *states, **options)

    monkeypatch.setattr(flex, "flex_attention", on_a_small_card)
    model = build(SMALL, head_dim=256)
    with torch.inference_mode():
        tokens = ordinary_tokens(VOCAB_SIZE, 5)
        (rows,) = plain_logits(model, [tokens])
        with capture_logs() as logs:
            decoder = decoder_over(
                model, "tiny", cache_tokens=4 * BLOCK, graph_rows=16, longest=BLOCK
            )
        (warning,) = [line for line in logs if line["log_level"] == "warning"]
        assert "out of resource: shared memory" in warning["reason"]
        assert rows_computed == {FEW}
        rows_computed.clear()
        caches = [cache for cache in (decoder.reserve(BLOCK) for _ in range(2)) if cache]
        found = decoder.forward([Feed(cache, tokens, 5) for cache in caches])
        for own in torch.split(found.logits, 5):
            assert difference(PassOutput(rows), PassOutput(own)) < TOLERANCE
    assert not rows_computed


@pytest.mark.parametrize(
    ("limit", "all_compiled"), [("recompile_limit", True), ("accumulated_recompile_limit", False)]
)
def test_a_process_compiles_for_several_models(
    limit: str, all_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target in float32 reaches torch's limit of a function, here two: its drafter in float16 is
    compiled all the same. Beyond torch's limit of everything it takes one call a text, with one
    warning. Traced as on a device, by a compiler that only counts."""
    compiled: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(len(inputs))
        return graph.forward

    torch._dynamo.reset()
    counting = torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=backend)
    monkeypatch.setattr(flex, "flex_attention", counting)
    found = []
    with capture_logs() as logs, torch._dynamo.config.patch({limit: 2}):
        for dtype in (torch.float32, torch.float16):
            model = build(SMALL).to(dtype)
            decoder = decoder_over(model, "tiny", cache_tokens=BLOCK)
            found.append(decoder._backends.current.in_one_call)
    warnings = [line["reason"] for line in logs if line["log_level"] == "warning"]
    assert found == [True, all_compiled]
    assert (len(compiled) > 2) == all_compiled
    if all_compiled:
        assert not warnings
    else:
        (warning,) = warnings
        assert "FailOnRecompileLimitHit" in warning


def test_the_start_feeds_what_is_compiled_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the size of a tile, from 128 rows on, and for more than one number of blocks."""
    kinds = set()
    making = Tiles.mask

    def noting(self: Tiles, *args: Any) -> BlockMask:
        mask = making(self, *args)
        kinds.add((self.size, len(self.rows) >= 128, mask.kv_indices.shape[-1] > 4))
        return mask

    monkeypatch.setattr(Tiles, "mask", noting)
    decoder_over(build(SMALL), "tiny", cache_tokens=BLOCK)
    of_few = {(FEW, many_rows, many) for many_rows in (False, True) for many in (False, True)}
    assert kinds == of_few | {(MANY, True, False), (MANY, True, True)}


def test_what_is_served_by_another_thread_is_compiled_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch keeps its limit for each thread, and the one that loads is not the one that serves."""

    def backend(graph: Any, inputs: Any) -> Any:
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=backend)
    monkeypatch.setattr(flex, "flex_attention", compiled)
    monkeypatch.setattr(one_call, "_compile", lambda *_: None)  # the probe's batches are enough
    decoder = decoder_over(build(SMALL), "tiny", cache_tokens=4 * BLOCK)
    # A kind of batch that the start, without trees, has not fed.
    decoder._backends.current.branches_in_one_call = True
    caches = [cache for cache in (decoder.reserve(BLOCK, 4) for _ in range(2)) if cache]

    @torch.inference_mode()
    def serve() -> Tensor:
        with torch._dynamo.config.patch(recompile_limit=1):
            return decoder.forward(
                [Feed(cache, [1, 2, 3], 1, (0, 0, 1)) for cache in caches]
            ).logits

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(serve).result().isfinite().all()

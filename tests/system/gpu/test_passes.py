"""Passes of a real GPU: attention in one call, captured graphs, and the plain logits of each."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from transformers import PreTrainedModel

from tandem.inference.decoder import Decoder
from tandem.inference.feed import Feed
from tandem.inference.loading.weights import device_of
from tandem.kernels import triton_attention, triton_layer
from tests.support.decoders import decoder_over
from tests.support.models.architectures import SUPPORTED, Architecture, build
from tests.support.models.parity import (
    TOLERANCE,
    differences,
    plain,
    plain_logits,
    ragged_logits,
    ragged_rows,
    random_texts,
)
from tests.support.models.trees import narrow, plain_rows, random_trees, tree_rows, worst_of
from tests.unit.inference.passes.test_cuda_graphs import difference, reserved

pytestmark = pytest.mark.campaign(
    "passes, rounds, kernels and the law on a real GPU",
    "unit/inference/passes and batch, unit/kernels: the same code with fake devices, kernels "
    "interpreted",
)

_SIZES = {"hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 512}
_OF_SOME = {
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "ffn_dim": 96,
    "word_embed_proj_dim": 64,
    "moe_intermediate_size": 48,
}
# Of float32 in another order; half precision differs by a hundred times as much.
CLOSE = 5 * TOLERANCE
# Experts are chosen by reading numbers from the device, which no graph can do.
EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe")
ROWS, LONGEST = 16, 200
every_architecture = pytest.mark.parametrize("row", SUPPORTED, ids=lambda row: row.model_type)


def sized(row: Architecture, **options: Any) -> PreTrainedModel:
    own = {name: value for name, value in _OF_SOME.items() if name in row.options}
    return build(row, **{**_SIZES, **own, **options})


def on_the_gpu(model: PreTrainedModel, rows: int = ROWS, states_of: str = "none") -> Decoder:
    """A decoder that attends in one call, with graphs, unless a warning says why not."""
    return decoder_over(
        model.to(device_of("cuda")),
        "tiny",
        cache_tokens=8192,
        trees=True,
        graph_rows=rows,
        longest=LONGEST,
        states_of=states_of,
    )


@every_architecture
def test_every_architecture_gives_the_plain_logits_in_one_call_and_by_graphs(
    row: Architecture,
) -> None:
    model, texts = sized(row), random_texts()
    expected, trees = plain_logits(model, texts), random_trees(1)
    branches = plain_rows(sized(row, **narrow(row)), trees)
    with capture_logs() as logs:
        decoder = on_the_gpu(model)
        narrowed = on_the_gpu(sized(row, **narrow(row)), rows=0)
    backend = decoder._backends.current
    warnings = [str(line) for line in logs if line["log_level"] == "warning"]
    if row.model_type in EXPERTS:
        (warning,) = warnings
        assert "CUDA graphs" in warning
    else:
        assert not warnings
        assert backend.graphs is not None
    assert backend.in_one_call
    cuda: Any = torch.backends.cuda
    assert not cuda.cudnn_sdp_enabled(), "it plans anew for each length"
    assert torch.cat(expected).std() > 1, "too flat to show a difference"
    assert differences(expected, ragged_logits(decoder, texts)).max() < CLOSE
    found = [rows for group in (trees[:1], trees[1:]) for rows in tree_rows(narrowed, group)]
    assert worst_of(branches, found) < CLOSE


GRAPHS = [row for row in SUPPORTED if row.model_type in ("llama", "mistral", "qwen3", "gemma2")]


@pytest.mark.parametrize("row", GRAPHS, ids=lambda row: row.model_type)
@torch.inference_mode()
def test_replayed_passes_give_the_logits_of_plain_ones(row: Architecture) -> None:
    """Batch after batch in the same memory, with hidden states."""
    decoders = [on_the_gpu(sized(row), rows, "1,last") for rows in (ROWS, 0)]
    assert decoders[0]._backends.current.graphs is not None
    with reserved(decoders[0], 9) as captured, reserved(decoders[1], 9) as bare:
        worst = difference(decoders, [captured, bare], random.Random(1), 100)
    assert worst < CLOSE


@pytest.mark.parametrize("row", GRAPHS, ids=lambda row: row.model_type)
@torch.inference_mode()
def test_a_prefix_that_is_found_gives_the_logits_of_a_computed_one(row: Architecture) -> None:
    """Where the place that it was computed at and the one that it is copied to differ."""
    decoder = on_the_gpu(sized(row))
    texts = [[(11 * seed + 7 * place) % 60 for place in range(150)] for seed in range(3)]
    # As long as captured passes allow, and longer.
    rounds = [(16, 0), (40, 3), (5, 3)]

    def logits(found: int) -> list[Any]:
        caches = [cache for cache in (decoder.reserve(180) for _ in texts) if cache]
        rows = []
        for cache, text in zip(caches, texts, strict=True):
            assert cache.adopt(text[:81], "") == found
            decoder.forward([Feed(cache, text[found:81], 0)])
            cache.publish(text, 81)
        for count, wanted in rounds:
            feeds = [
                Feed(cache, text[cache.length : cache.length + count], wanted)
                for cache, text in zip(caches, texts, strict=True)
            ]
            rows.append(decoder.forward(feeds).logits.cpu())
        for cache in caches:
            decoder.release(cache)
        return rows

    cold, warm = torch.cat(logits(0)), torch.cat(logits(80))
    assert cold.std() > 1
    assert (warm - cold).abs().max() < CLOSE


@pytest.mark.parametrize("row", GRAPHS, ids=lambda row: row.model_type)
@torch.inference_mode()
def test_nothing_is_compiled_while_texts_are_served(row: Architecture) -> None:
    """200 batches of chains and trees, prompts among them, by another thread than the start's."""
    decoder = on_the_gpu(sized(row), rows=0)
    before = compiled()
    rng = random.Random(3)

    caches = [cache for cache in (decoder.reserve(180, 1) for _ in range(9)) if cache]

    @torch.inference_mode()
    def serve() -> None:
        for _ in range(200):
            most, feeds = rng.choice((1, 4, 16, 17, 64, 100)), []
            for cache in rng.sample(caches, rng.randint(1, 9)):
                count = rng.randint(1, most)
                cache.rollback(rng.randint(0, cache.capacity - count))
                parents = [rng.randint(0, i) for i in range(rng.randint(0, count))]
                feeds.append(Feed(cache, [1] * count, 1, parents or None))
            decoder.forward(feeds)

    with ThreadPoolExecutor(1) as engine:
        engine.submit(serve).result()
    assert compiled() == before


def compiled() -> int:
    """Kernels of this process, by shapes and dtypes."""
    kernels: list[Any] = [triton_attention.attend, triton_layer.turn_and_write, triton_layer.gate]
    return sum(len(caches[0]) for one in kernels for caches in one.device_caches.values())


@pytest.mark.parametrize("row", GRAPHS, ids=lambda row: row.model_type)
def test_hidden_states_are_those_of_plain_passes(row: Architecture) -> None:
    model, texts = sized(row), random_texts()
    own, expected = plain(model), []
    with torch.inference_mode():
        for text in texts:
            out = own(input_ids=torch.tensor([text]), use_cache=False, output_hidden_states=True)
            layers = [out.hidden_states[at][0] for at in (1, -1)]
            expected.append(torch.stack(layers, 1))
    _, states = ragged_rows(on_the_gpu(model, states_of="1,last"), texts)
    spread = torch.cat(expected).std((0, 2))[:, None]
    assert float((differences(expected, states) / spread).max()) < CLOSE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("row", GRAPHS, ids=lambda row: row.model_type)
def test_half_precision_is_as_good_as_transformers(row: Architecture, dtype: torch.dtype) -> None:
    texts = random_texts()
    exact = plain_logits(sized(row), texts)
    half = plain(sized(row)).to("cuda", dtype)
    with torch.inference_mode():
        theirs = [half(torch.tensor([text]).cuda(), use_cache=False).logits[0] for text in texts]
    of_modules = (torch.cat(theirs).float().cpu() - torch.cat(exact)).abs().mean()
    decoder = on_the_gpu(sized(row).to(dtype))
    assert decoder._backends.current.in_one_call
    ours = differences(exact, ragged_logits(decoder, texts)).mean()
    assert 0 < ours < 1.3 * of_modules

"""The pass by OpenVINO's runtime: parity with plain passes, in batches, in blocks, in texts."""

from __future__ import annotations

import asyncio
import copy
import os
import subprocess
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tandem.inference.choice.candidates import in_dtype
from tandem.inference.choice.choose import EngineName
from tandem.inference.feed import Feed
from tandem.inference.output import PassOutput
from tandem.speculation.request.sampling import Sampling
from tests.support.decoders import decoder_over
from tests.support.devices.bfloat16 import needs_units
from tests.support.laws.laws import chi_square_p_value
from tests.support.models.architectures import (
    KINDS,
    LLAMA,
    SUPPORTED,
    Architecture,
    build,
    light,
    one_layer,
)
from tests.support.models.parity import (
    TOLERANCE,
    differences,
    plain,
    plain_logits,
    ragged_logits,
    random_texts,
    worst_difference,
    worst_with_states,
)
from tests.support.models.tiny import (
    Text,
    make_drafter,
    make_target,
    random_llama,
    running,
    speculate,
)
from tests.support.processes.fork_server import Forked
from tests.support.waiting import HANG_SECONDS

OTHERS = pytest.mark.campaign(
    "hidden states by OpenVINO, of every architecture, and its logits without them",
    "hidden states of six architectures, logits of each (this file); hidden states of "
    "every one by torch",
)

pytestmark = pytest.mark.real_time  # the engine has its thread

pytest.importorskip("openvino")


# The scores of Gemma 2 have soft caps, which the paged attention has not.
CONVERTED = [row for row in SUPPORTED if row.model_type != "gemma2"]
PROMPT = [0, 1, 2]
AT_ONCE = 60


@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize(
    ("row", "with_states"),
    [
        pytest.param(
            row,
            states,
            id=f"{row.model_type}-{'states' if states else 'logits'}",
            # Hidden states of one of each kind, and of the others logits alone.
            marks=() if states == (row in KINDS) else OTHERS,
        )
        for row in CONVERTED
        for states in (False, True)
    ],
)
def test_ragged_batches_with_rollbacks_give_the_plain_logits_and_hidden_states(
    row: Architecture, with_states: bool
) -> None:
    if with_states:
        logits, states = worst_with_states(row, "openvino")
        assert states < TOLERANCE
    else:
        logits = worst_difference(light(row), "openvino")
    assert logits < TOLERANCE


@needs_units
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gpt_neox"])
def test_bfloat16_rounds_no_more_than_the_modules(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = one_layer(next(row for row in SUPPORTED if row.model_type == model_type))
    texts = random_texts()
    exact = plain_logits(build(row), texts)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    half = in_dtype(build(row), torch.bfloat16)
    of_modules = (torch.cat(plain_logits(half, texts)).float() - torch.cat(exact)).abs().mean()
    decoder = decoder_over(half, row.name, cache_tokens=1024, engine="openvino")
    assert decoder.engine == "openvino"
    ours = differences(exact, ragged_logits(decoder, texts)).mean()
    assert 0 < ours < 1.2 * of_modules


@torch.inference_mode()
def test_a_batch_may_ask_for_no_rows_and_reach_into_many_blocks() -> None:
    model, text = random_llama(1, 31), [i * 7 % 31 for i in range(150)]
    expected = plain(model)(input_ids=torch.tensor([text])).logits[0]
    decoder = decoder_over(model, "tiny", cache_tokens=512, engine="openvino")
    caches = [decoder.reserve(150) for _ in range(2)]
    for first, last, rows in ((0, 100, 0), (100, 101, 1), (101, 150, 49)):
        feeds = [Feed(cache, text[first:last], rows) for cache in caches if cache is not None]
        found = decoder.forward(feeds).logits.view(2, rows, 31)
        assert torch.allclose(found, expected[last - rows : last], atol=TOLERANCE)


@torch.inference_mode()
def test_what_others_left_in_a_block_is_not_seen() -> None:
    model, text = random_llama(1, 31), [3, 1, 4, 1, 5]
    expected = plain(model)(input_ids=torch.tensor([text])).logits[0]
    decoder = decoder_over(model, "tiny", cache_tokens=64, engine="openvino")
    for tensor in decoder.pool.tensors:
        tensor.data[...] = np.nan
    cache = decoder.reserve(5)
    assert cache is not None
    found = decoder.forward([Feed(cache, text, 5)]).logits
    assert torch.allclose(found, expected, atol=TOLERANCE)


def test_a_sequence_has_whole_blocks() -> None:
    pool = decoder_over(random_llama(1), "tiny", cache_tokens=100, engine="openvino").pool
    assert pool.positions == pool.free_positions == 128
    caches = [pool.reserve(size) for size in (1, 33, 32)]
    assert [cache.table for cache in caches if cache] == [[0], [1, 2], [3]]
    assert pool.reserve(1) is None
    # One layer of two heads of 8, keys and values, float32; nothing else is allocated.
    assert pool.bytes_per_position == 128
    assert sum(tensor.byte_size for tensor in pool.tensors) == 128 * 128


@torch.inference_mode()
def test_nothing_of_the_model_is_read_once_it_is_compiled() -> None:
    """The weights are freed then, and something else lies there."""
    texts, model = random_texts(), build(LLAMA)
    expected = plain_logits(model, texts)
    weights = [parameter.data for parameter in model.parameters()]
    decoder = decoder_over(model, "tiny", cache_tokens=512, engine="openvino")
    assert not any(parameter.numel() for parameter in model.parameters())
    for weight in weights:
        weight.fill_(torch.nan)
    assert differences(expected, ragged_logits(decoder, texts)).max() < TOLERANCE


@torch.inference_mode()
@pytest.mark.parametrize(
    ("dtype", "kept_as"),
    [(torch.bfloat16, "bf16"), (torch.float16, "f16"), (torch.float32, "f32")],
    ids=str,
)
def test_float32_keeps_matrices_as_the_checkpoint_has_them(
    dtype: torch.dtype, kept_as: str
) -> None:
    """Their products are float32's own; the layers that are compared beside have bfloat16's."""
    from tandem.inference.openvino import graph, trace

    model, texts = random_llama(1, 31), random_texts()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).float()
    texts = [[token_id % 31 for token_id in text] for text in texts]
    expected = plain_logits(model, texts)
    weights = trace.weights_of(model)
    whole = graph.complete(trace.trace(model), weights, graph.precision_of(torch.float32))
    kinds = {
        op.get_element_type().to_string()
        for op in whole.get_ops()
        if op.get_type_name() == "Constant" and list(op.shape) == [31, 16]
    }
    assert kinds == {kept_as}
    decoder = decoder_over(model, "tiny", cache_tokens=512, engine="openvino")
    assert differences(expected, ragged_logits(decoder, texts)).max() < TOLERANCE


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The compiled models that computed passes, in order."""
    from tandem.inference.openvino import paged_pass as openvino_pass

    found: list[Any] = []
    infer = openvino_pass._Request.infer

    def noted(self: Any, *rest: Any) -> PassOutput:
        found.append(self)
        return infer(self, *rest)

    monkeypatch.setattr(openvino_pass._Request, "infer", noted)
    return found


def test_single_tokens_are_computed_apart_and_alike(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is small beside the free memory is compiled twice, since a change of sizes takes
    time; both see one cache."""
    from tandem.inference.openvino import paged_pass as openvino_pass

    texts = random_texts()
    expected = plain_logits(build(LLAMA), texts)
    for share, apart in ((1, True), (0, False)):
        monkeypatch.setattr(openvino_pass, "_SHARE", share)
        decoder = decoder_over(build(LLAMA), "tiny", cache_tokens=512, engine="openvino")
        compute: Any = decoder._backends.current.compute
        assert (compute._singles is not compute._others) == apart
        asked.clear()
        assert differences(expected, ragged_logits(decoder, texts)).max() < TOLERANCE
        cache = decoder.reserve(4)
        assert cache is not None
        decoder.forward([Feed(cache, [1, 2], 1)])
        decoder.forward([Feed(cache, [1], 1)])
        assert asked[-2:] == [compute._others, compute._singles]


def test_weights_of_16_bits_are_widened_once_for_passes_of_more_tokens(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, where the wide ones have room; both give float32's logits, over one cache."""
    from tandem.inference.openvino import paged_pass as openvino_pass

    model, texts = random_llama(1, 31), random_texts()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    texts = [[token_id % 31 for token_id in text] for text in texts]
    expected = plain_logits(model, texts)
    for share, large in ((1, True), (1, False), (0, True)):
        monkeypatch.setattr(openvino_pass, "_SHARE", share)
        monkeypatch.setattr(openvino_pass, "_SMALL", 0 if large else 10**9)
        decoder = decoder_over(copy.deepcopy(model), "tiny", cache_tokens=512, engine="openvino")
        compute: Any = decoder._backends.current.compute
        caches: list[Any] = [decoder.reserve(8) for _ in range(5)]
        asked.clear()
        for texts_at_once in (1, 4, 5):
            decoder.forward([Feed(cache, [1], 1) for cache in caches[:texts_at_once]])
        assert [has_wide(each) for each in asked] == [False, False, share == 1 and large]
        assert has_wide(compute._others) == (share == 1)
        assert compute.form == (", wide" if share else "")
        assert differences(expected, ragged_logits(decoder, texts)).max() < TOLERANCE


def has_wide(request: Any) -> bool:
    """Whether a compiled model has its output matrix, of 31 x 16 numbers, in 32 bits."""
    kinds = {
        op.get_output_element_type(0).to_string()
        for op in request._compiled.get_runtime_model().get_ops()
        if op.get_output_size()
        and list(op.output(0).get_partial_shape().get_min_shape()) == [31, 16]
    }
    assert "bf16" in kinds, "the embedding, of the same form, is only read"
    return "f32" in kinds


async def sampled(engine: EngineName, seeds: range) -> list[list[int]]:
    """A text of each seed, through both engines."""
    drafter = make_drafter(random_llama(2), engine=engine)
    target = make_target(random_llama(1), engine=engine)
    assert drafter.decoder.engine == target.decoder.engine == engine
    texts: list[Text] = []
    async with running(drafter, target):
        for first in range(0, len(seeds), AT_ONCE):
            texts += await asyncio.gather(
                *(
                    speculate(drafter, target, PROMPT, 4, gamma=3, rule="block", sampling=sampling)
                    for sampling in (Sampling(seed=seed) for seed in seeds[first : first + AT_ONCE])
                )
            )
    return [list(text.token_ids) for text in texts]


async def test_sampled_texts_are_those_of_torch() -> None:
    seeds = range(AT_ONCE)
    assert await sampled("openvino", seeds) == await sampled("torch", seeds)


@pytest.mark.campaign(
    "texts by OpenVINO follow the target's law",
    "they are those by torch, whose law is counted; the logits of every architecture (this file)",
)
async def test_sampled_texts_follow_the_models_own_law() -> None:
    counts = np.zeros(5**3)
    for text in await sampled("openvino", range(900)):
        counts[int(np.dot((25, 5, 1), text[:3]))] += 1
    law = law_of(random_llama(1).double(), PROMPT, 3)
    assert chi_square_p_value(counts, law) > 1e-3


@torch.inference_mode()
def law_of(model: PreTrainedModel, prompt: list[int], length: int) -> Any:
    """[V ** length] exact probabilities of the first tokens after a prompt, in float64."""
    texts = torch.tensor(list(product(range(5), repeat=length)))
    prompts = torch.tensor(prompt).expand(len(texts), -1)
    logits = model(torch.cat((prompts, texts), 1)).logits
    rows = logits[:, len(prompt) - 1 : -1].log_softmax(-1)
    return rows.gather(2, texts[..., None])[..., 0].sum(1).exp().numpy()


@pytest.fixture(scope="module")
def ended() -> tuple[int, str]:
    """Exit code and output of a process that imports OpenVINO and gives a pass up."""
    process = Forked(["tests.support.processes.given_up"], dict(os.environ), stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as pipe:
        said = pipe.read().decode()
    return process.wait(HANG_SECONDS), said


def test_nothing_is_sent_and_nothing_forked_by_its_import(ended: tuple[int, str]) -> None:
    assert ended[1] == "nothing\n", ended[1][-1000:]


def test_a_signal_is_survived_when_a_pass_is_gone(ended: tuple[int, str]) -> None:
    assert ended[0] == 7, ended[1][-1000:]

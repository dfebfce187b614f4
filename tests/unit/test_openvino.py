"""The pass by OpenVINO's runtime: parity with plain passes, and what becomes of a model without."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor
from transformers import PreTrainedModel

from tandem.errors import StartupError
from tandem.inference import choice
from tandem.inference.decoder import Decoder
from tandem.inference.feed import Feed
from tandem.speculation.sampling import Sampling
from tests.architectures import SUPPORTED, Architecture, build
from tests.laws import chi_square_p_value
from tests.parity import (
    TOLERANCE,
    differences,
    plain,
    plain_logits,
    ragged_logits,
    random_texts,
    worst_difference,
)
from tests.tiny import Text, make_drafter, make_target, random_llama, running, speculate

pytest.importorskip("openvino")
from openvino import opset15 as ops

from tandem.inference import openvino_graph, openvino_trace, record
from tandem.inference.openvino_pass import OpenVinoPass

# Its scores have soft caps, which the paged attention has not.
LEFT_TO_TORCH = ("gemma2",)
CONVERTED = [row for row in SUPPORTED if row.model_type not in LEFT_TO_TORCH]
LLAMA = next(row for row in SUPPORTED if row.model_type == "llama")
PROMPT = [0, 1, 2]
AT_ONCE = 60
Logs = Sequence[MutableMapping[str, Any]]


@pytest.fixture(autouse=True, scope="module")
def kept_graphs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of this module's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield record.cache_folder()


def warnings_of(logs: Logs) -> list[str]:
    return [str(line["reason"]) for line in logs if line["log_level"] == "warning"]


@pytest.mark.parametrize("row", CONVERTED, ids=lambda row: row.model_type)
def test_ragged_batches_with_rollbacks_give_the_plain_logits(row: Architecture) -> None:
    assert worst_difference(row, "openvino") < TOLERANCE


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gpt_neox"])
def test_bfloat16_rounds_no_more_than_the_modules(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = next(row for row in SUPPORTED if row.model_type == model_type)
    texts = random_texts()
    exact = plain_logits(build(row), texts)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    half = build(row).to(torch.bfloat16)
    of_modules = (torch.cat(plain_logits(half, texts)).float() - torch.cat(exact)).abs().mean()
    decoder = Decoder(half, row.name, cache_tokens=1024, engine="openvino")
    assert decoder.engine == "openvino"
    ours = differences(exact, ragged_logits(decoder, texts)).mean()
    assert 0 < ours < 1.2 * of_modules


@torch.inference_mode()
def test_a_batch_may_ask_for_no_rows_and_reach_into_many_blocks() -> None:
    model, text = random_llama(1, 31), [i * 7 % 31 for i in range(150)]
    expected = plain(model)(input_ids=torch.tensor([text])).logits[0]
    decoder = Decoder(model, "tiny", cache_tokens=512, engine="openvino")
    caches = [decoder.reserve(150) for _ in range(2)]
    for first, last, rows in ((0, 100, 0), (100, 101, 1), (101, 150, 49)):
        feeds = [Feed(cache, text[first:last], rows) for cache in caches if cache is not None]
        found = decoder.forward(feeds).view(2, rows, 31)
        assert torch.allclose(found, expected[last - rows : last], atol=TOLERANCE)


@torch.inference_mode()
def test_what_others_left_in_a_block_is_not_seen() -> None:
    model, text = random_llama(1, 31), [3, 1, 4, 1, 5]
    expected = plain(model)(input_ids=torch.tensor([text])).logits[0]
    decoder = Decoder(model, "tiny", cache_tokens=64, engine="openvino")
    for tensor in decoder.pool.tensors:
        tensor.data[...] = np.nan
    cache = decoder.reserve(5)
    assert cache is not None
    assert torch.allclose(decoder.forward([Feed(cache, text, 5)]), expected, atol=TOLERANCE)


def test_extents_are_whole_blocks() -> None:
    pool = Decoder(random_llama(1), "tiny", cache_tokens=100, engine="openvino").pool
    assert pool.positions == pool.free_positions == 128
    caches = [pool.reserve(size) for size in (1, 33, 32)]
    assert [cache.start for cache in caches if cache] == [0, 32, 96]
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
    decoder = Decoder(model, "tiny", cache_tokens=512, engine="openvino")
    assert not any(parameter.numel() for parameter in model.parameters())
    for weight in weights:
        weight.fill_(torch.nan)
    assert differences(expected, ragged_logits(decoder, texts)).max() < TOLERANCE


def test_what_it_cannot_do_is_one_warning_and_the_torch_pass() -> None:
    row = next(row for row in SUPPORTED if row.model_type in LEFT_TO_TORCH)
    texts = random_texts()
    expected = plain_logits(build(row), texts)
    with capture_logs() as logs:
        decoder = Decoder(build(row), row.name, cache_tokens=256, engine="openvino")
    assert decoder.engine == "torch"
    assert warnings_of(logs) == ["Unsupported: soft caps of attention's scores"]
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
    with capture_logs() as logs:
        decoder = Decoder(build(LLAMA), "tiny", engine=engine)
    assert decoder.engine == "torch"
    (warning,) = warnings_of(logs)
    assert reason in warning
    assert "\n" not in warning


@pytest.mark.parametrize(
    ("dtype", "reason"),
    [(torch.float16, "in torch.float16"), (torch.bfloat16, "in bfloat16 by one thread")],
)
def test_what_would_crash_is_left_to_torch(dtype: torch.dtype, reason: str) -> None:
    """The tests run in one thread."""
    with capture_logs() as logs:
        assert Decoder(random_llama(1).to(dtype), "half", engine="auto").engine == "torch"
    assert warnings_of(logs) == [f"Unsupported: OpenVINO's pass {reason}"]


def test_on_another_device_it_is_refused() -> None:
    with pytest.raises(StartupError, match="ENGINE=openvino runs on a CPU, not on meta"):
        choice.choose_backend(random_llama(1).to("meta"), "openvino")


@pytest.mark.parametrize(("gain", "engine"), [(1.5, "openvino"), (0.9, "torch")])
@pytest.mark.usefixtures("own_cache")
def test_the_faster_one_is_taken(gain: float, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either then gives the plain logits: the other one has left it its weights."""
    monkeypatch.setattr(choice, "_gain", lambda *_: gain)
    texts = random_texts()
    expected = plain_logits(build(LLAMA), texts)
    decoder = Decoder(build(LLAMA), "tiny", cache_tokens=512, engine="auto")
    assert decoder.engine == engine
    assert differences(expected, ragged_logits(decoder, texts)).max() < TOLERANCE


@pytest.mark.usefixtures("own_cache")
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


# What is kept on disk.


def load(model: PreTrainedModel | None = None) -> tuple[Decoder, list[str]]:
    with capture_logs() as logs:
        decoder = Decoder(model or build(LLAMA), "tiny", cache_tokens=512, engine="openvino")
    return decoder, warnings_of(logs)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return record.cache_folder()


def graphs(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/graph.xml"))


def test_a_kept_graph_serves_other_weights(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load()[1] == []
    assert len(graphs(own_cache)) == 1
    # Traced again it would fail, and be a warning.
    monkeypatch.setattr(openvino_trace, "trace", None)
    model, texts = build(LLAMA), random_texts()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    expected = plain_logits(model, texts)
    decoder, warnings = load(model)
    assert (decoder.engine, warnings) == ("openvino", [])
    assert differences(expected, ragged_logits(decoder, texts)).max() < TOLERANCE


def test_another_configuration_or_version_is_another_graph(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load()
    load(build(LLAMA, rms_norm_eps=1e-3))
    monkeypatch.setattr(record, "version", lambda _: "another")
    load()
    assert len(graphs(own_cache)) == 3


@pytest.mark.parametrize("name", ["graph.xml", "graph.bin", "sha256"])
@pytest.mark.parametrize("content", [None, b"", b"no graph"])
def test_a_broken_graph_is_one_warning_and_made_anew(
    own_cache: Path, name: str, content: bytes | None
) -> None:
    load()
    file = graphs(own_cache)[0].with_name(name)
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    decoder, warnings = load()
    assert (decoder.engine, len(warnings)) == ("openvino", 1)
    assert load()[1] == []


def test_a_home_that_cannot_be_written_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    decoder, warnings = load()
    assert (decoder.engine, len(warnings)) == ("openvino", 1)


# Texts.


async def counted(rule: str, seeds: range, length: int) -> Any:
    """[V ** length] how often each text came, through both engines."""
    drafter = make_drafter(random_llama(2), engine="openvino")
    target = make_target(random_llama(1), engine="openvino")
    assert drafter.decoder.engine == target.decoder.engine == "openvino"
    counts = np.zeros(5**length)
    weights = 5 ** np.arange(length - 1, -1, -1)
    async with running(drafter, target):
        for first in range(0, len(seeds), AT_ONCE):
            texts: list[Text] = await asyncio.gather(
                *(
                    speculate(drafter, target, PROMPT, 4, gamma=3, rule=rule, sampling=sampling)
                    for sampling in (Sampling(seed=seed) for seed in seeds[first : first + AT_ONCE])
                )
            )
            for text in texts:
                counts[int(np.dot(weights, text.token_ids[:length]))] += 1
    return counts


@pytest.mark.parametrize("rule", ["token", "block"])
async def test_sampled_texts_follow_the_models_own_law(rule: str) -> None:
    law = law_of(random_llama(1).double(), PROMPT, 3)
    assert chi_square_p_value(await counted(rule, range(1_500), 3), law) > 1e-3


@torch.inference_mode()
def law_of(model: PreTrainedModel, prompt: list[int], length: int) -> Any:
    """[V ** length] exact probabilities of the first tokens behind a prompt, in float64."""
    texts = torch.tensor(list(product(range(5), repeat=length)))
    prompts = torch.tensor(prompt).expand(len(texts), -1)
    logits = model(torch.cat((prompts, texts), 1)).logits
    rows = logits[:, len(prompt) - 1 : -1].log_softmax(-1)
    return rows.gather(2, texts[..., None])[..., 0].sum(1).exp().numpy()


def test_single_tokens_are_computed_apart_and_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model is compiled twice, since a change of sizes costs; both see one cache."""
    from tandem.inference import openvino_pass

    texts = random_texts()
    expected = plain_logits(build(LLAMA), texts)
    for most, apart in ((10**9, True), (0, False)):
        monkeypatch.setattr(openvino_pass, "_SMALL", most)
        decoder = Decoder(build(LLAMA), "tiny", cache_tokens=512, engine="openvino")
        compute: Any = decoder._backend._compute
        assert (compute._singles is not compute._others) == apart
        used: list[Any] = []
        infer = openvino_pass._Request.infer

        def noted(self: Any, *rest: Any, used: list[Any] = used, infer: Any = infer) -> Tensor:
            used.append(self)
            logits: Tensor = infer(self, *rest)
            return logits

        monkeypatch.setattr(openvino_pass._Request, "infer", noted)
        assert differences(expected, ragged_logits(decoder, texts)).max() < TOLERANCE
        cache = decoder.reserve(4)
        assert cache is not None
        decoder.forward([Feed(cache, [1, 2], 1)])
        decoder.forward([Feed(cache, [1], 1)])
        assert used[-2:] == [compute._others, compute._singles]
        monkeypatch.setattr(openvino_pass._Request, "infer", infer)

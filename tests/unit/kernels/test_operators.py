"""Operators as torch sees them: their shapes and devices, and how many kernels a layer takes."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedConfig

from tandem.inference.batch.tiles import FEW
from tandem.inference.feed import Feed
from tandem.inference.passes import cuda_graphs as graph
from tandem.inference.passes.torch_llama import LlamaLayer
from tandem.kernels import attention, draws, verdicts
from tests.support.devices.counting import Kernels
from tests.support.devices.recording import Recorder
from tests.unit.inference.passes.fake_device import (
    LLAMA,
    MISTRAL,
    QWEN,
    Host,
    clock,
    decoder_on_device,
    host,
    in_one_call,
    kernel,
)

__all__ = ["clock", "host", "in_one_call", "kernel"]  # fixtures of the fake device

OPERATORS = torch.ops.tandem
# Norms, two; q, k and v; rotations; attention; out; gate and up; the gate; down.
A_LAYER = 9
# A feed of each kind: rows, and parents of branch rows among them.
FEEDS: dict[str, list[tuple[int, Sequence[int] | None]]] = {
    "two single rows": [(1, None), (1, None)],
    "a chunk of a prompt": [(17, None)],
    "a tree and a chain": [(4, (0, 0, 1)), (3, None)],
}


def arguments(dtype: torch.dtype, device: str) -> dict[str, tuple[Any, ...]]:
    """Of each operator: 5 rows, 6 query heads and 2 key heads, keys of 8 and values of 4."""

    def numbers(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    ids, floats = torch.int64, torch.float32
    counts = numbers(2, attention.COUNTED, dtype=torch.int32)
    tiles, rows = numbers(6, 2, dtype=ids), numbers(3, 5, dtype=ids)
    states = numbers(5, 6, 8).transpose(0, 1), numbers(2, 40, 8), numbers(2, 40, 4)
    turned = numbers(5, 10, 8), numbers(5, 1, 4, 2, dtype=floats), torch.arange(5, device=device)
    pool = numbers(2, 40, 8), numbers(2, 40, 8)
    asked = numbers(3, draws.DIGITS + 4, dtype=torch.float64)
    asked[:, draws.SIZE], asked[:, draws.TOP_P] = 24, 1
    laws = numbers(3, draws.LAW, dtype=torch.float64)
    texts = numbers(2, verdicts.UNIFORMS + 1 + 5 * 2, dtype=torch.float64)
    return {
        "draw": (numbers(3, 24), asked, numbers(3, 1, dtype=ids), 0.9, 16, 2),
        "laws": (numbers(3, 24), asked),
        "decide": (numbers(3, 24), laws, asked, texts, numbers(2, 33, dtype=ids), True),
        "attend": (*states, tiles, rows, counts, FEW, 1, 0.5, 0.0),
        "turn_and_write": (*turned, *pool, 6, None, 0.0),
        "turn_and_write, normed": (*turned, *pool, 6, numbers(8, 8, dtype=floats), 1e-5),
        "gate": (numbers(5, 24),),
    }


SHAPES = {
    "draw": (3, 34),
    "laws": (3, 6),
    "decide": (2, 5),
    "attend": (5, 6, 4),
    "turn_and_write": (5, 6, 8),
    "turn_and_write, normed": (5, 6, 8),
    "gate": (5, 12),
}
# Of those whose results are no states.
DTYPES = {"draw": torch.int64, "laws": torch.float64, "decide": torch.float64}


def operator(name: str) -> Any:
    return getattr(OPERATORS, name.split(",")[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_fake_tensors_have_the_shapes_of_real_ones(name: str, dtype: torch.dtype) -> None:
    real = operator(name)(*arguments(dtype, "cpu")[name])
    with FakeTensorMode():
        fake = operator(name)(*arguments(dtype, "cuda")[name])
    assert tuple(real.shape) == tuple(fake.shape) == SHAPES[name]
    assert (real.dtype, real.stride()) == (fake.dtype, fake.stride())
    assert (real.dtype, fake.device.type) == (DTYPES.get(name, dtype), "cuda")


@pytest.mark.campaign(
    "an operator writes only what its schema says",
    "its shapes, dtypes and devices (this file); what it computes (test_interpreted.py)",
)
@pytest.mark.parametrize("name", SHAPES)
def test_an_operator_writes_what_its_schema_says(name: str) -> None:
    given = arguments(torch.float32, "cpu")[name]
    torch.library.opcheck(operator(name).default, given, test_utils=("test_schema",))


def misplaced() -> list[tuple[str, int]]:
    """Each tensor of each operator that takes several."""
    return [
        (name, place)
        for name, given in arguments(torch.float32, "meta").items()
        for place, one in enumerate(given)
        if isinstance(one, Tensor) and len(given) > 1
    ]


@pytest.mark.parametrize(("name", "place"), misplaced())
def test_tensors_of_two_devices_are_refused(name: str, place: int) -> None:
    with FakeTensorMode():
        given = list(arguments(torch.float32, "cuda")[name])
        given[place] = arguments(torch.float32, "cpu")[name][place]
        with pytest.raises(RuntimeError, match="more than one device"):
            operator(name)(*given)


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> list[Counter[str]]:
    """What ran in each layer that was computed."""
    found: list[Counter[str]] = []
    forward = LlamaLayer.forward

    def counted(self: LlamaLayer, *args: Any) -> Tensor:
        with Kernels() as kernels:
            states = forward(self, *args)
        found.append(kernels.ran)
        return states

    monkeypatch.setattr(LlamaLayer, "forward", counted)
    return found


@pytest.mark.parametrize("feeds", FEEDS)
@pytest.mark.parametrize("config", [LLAMA, QWEN, MISTRAL], ids=lambda one: str(one.model_type))
def test_a_layer_takes_few_kernels(
    host: Host, layers: list[Counter[str]], config: PreTrainedConfig, feeds: str
) -> None:
    """And waits for none of them: a number that is asked of a fake tensor would be an error."""
    decoder = decoder_on_device(copy.deepcopy(config))
    caches = [decoder.reserve(40) for _ in FEEDS[feeds]]
    decoder.forward([Feed(cache, [1, 2, 3], 1) for cache in caches if cache])
    layers.clear()
    decoder.forward(
        [
            Feed(cache, [4] * rows, 1, parents)
            for cache, (rows, parents) in zip(caches, FEEDS[feeds], strict=True)
            if cache
        ]
    )
    (ran,) = layers
    assert {name: ran[name] for name in ("attend", "turn_and_write", "gate", "send")} == {
        "attend": 1,
        "turn_and_write": 1,
        "gate": 1,
        "send": 0,
    }
    assert ran.total() <= A_LAYER, ran
    assert host.arrivals == 0


@pytest.mark.parametrize("in_one_call", [False], indirect=True)
def test_without_kernels_a_layer_takes_more(host: Host, layers: list[Counter[str]]) -> None:
    """A mutant: what is counted is there to be counted."""
    decoder = decoder_on_device(copy.deepcopy(LLAMA))
    caches = [decoder.reserve(40) for _ in range(2)]
    decoder.forward([Feed(cache, [1, 2, 3], 1) for cache in caches if cache])
    assert layers[0].total() > A_LAYER
    assert not layers[0]["attend"]


def test_a_captured_pass_is_sent_one_tensor(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether all logits are wanted or not. With drawn tokens and states: test_fake_cuda.py."""
    recorder = Recorder()
    monkeypatch.setattr(graph, "capture", recorder)
    monkeypatch.setattr(graph, "_check", lambda *_: None)  # which compares numbers
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    decoder = decoder_on_device(copy.deepcopy(LLAMA))
    caches = [cache for cache in (decoder.reserve(40) for _ in range(2)) if cache]
    decoder.forward([Feed(cache, [1, 2, 3], 1) for cache in caches])  # windows are known by it
    graph.capture_passes(decoder._backends.current, 16, 40)
    for feeds in (
        [Feed(cache, [1], 1) for cache in caches],
        [Feed(cache, [1, 2, 3], 1, (0, 0)) for cache in caches],
    ):
        replays = recorder.replays
        with Kernels() as kernels:
            decoder.forward(feeds)
        assert recorder.replays == replays + 1
        assert kernels.ran["send"] == 1

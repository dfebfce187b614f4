"""Models that use a group of layers several times: read, checked, and held once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig

from tandem.distillation import drafters
from tandem.errors import StartupError
from tandem.inference.choice.candidates import by_torch
from tandem.inference.decoder import Decoder, DecoderOptions
from tandem.inference.feed import Feed
from tandem.inference.loading.checkpoint import CheckpointSource, read_checkpoint
from tandem.inference.loading.extra_embeddings import MadeFor, write_extra_embeddings
from tandem.inference.loading.partial import ModelPart
from tandem.inference.loading.shared_layers import CYCLES, as_stored
from tandem.inference.passes.torch_llama import LlamaPass
from tests.support.models.tiny import random_llama

LAYERS, CYCLE = 6, 2
TEXT = [1, 2, 0, 3, 4, 1, 0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("shared")
    model: Any = random_llama(8, layers=CYCLE)
    model.config.num_hidden_layers = LAYERS
    setattr(model.config, CYCLES, LAYERS // CYCLE)
    model.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def rows(folder: Path) -> torch.Tensor:
    """Of a model with all layers, by `transformers`."""
    whole: Any = random_llama(8, layers=LAYERS)
    stored = random_llama(8, layers=CYCLE).state_dict()
    own = {}
    for name in whole.state_dict():
        first, mid, rest = name.partition("model.layers.")
        number, _, part = rest.partition(".")
        own[name] = stored[f"{mid}{int(number) % CYCLE}.{part}" if mid else first]
    whole.load_state_dict(own)
    with torch.inference_mode():
        logits: torch.Tensor = whole(torch.tensor([TEXT])).logits[0]
    return logits


@pytest.mark.parametrize("engine", ["torch", "openvino"])
def test_rows_are_those_of_all_layers(folder: Path, rows: torch.Tensor, engine: Any) -> None:
    checkpoint = read_checkpoint(CheckpointSource(str(folder)))
    assert checkpoint.about.layers == LAYERS
    decoder = Decoder(checkpoint, DecoderOptions(cache_tokens=64, engine=engine, threads=1))
    assert decoder.engine == engine
    cache = decoder.reserve(len(TEXT))
    assert cache is not None
    with torch.inference_mode():
        found = decoder.forward([Feed(cache, TEXT, len(TEXT))]).logits
    assert torch.allclose(found, rows, atol=1e-4)


@torch.inference_mode()
def test_weights_are_held_once(folder: Path) -> None:
    model = read_checkpoint(CheckpointSource(str(folder))).model
    stored: Any = AutoModelForCausalLM.from_config(random_llama(8, layers=CYCLE).config)
    assert model.num_parameters() == stored.num_parameters()
    compute = by_torch(model).compute
    assert isinstance(compute, LlamaPass)
    assert compute.cycles == LAYERS // CYCLE
    blocks: Any = compute.blocks
    assert len({id(block.down) for block in blocks}) == CYCLE
    assert len(set(map(id, blocks))) == LAYERS


def test_other_cycles_are_another_law(folder: Path, tmp_path: Path) -> None:
    for name in ("model.safetensors", "generation_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config |= {CYCLES: 2, "num_hidden_layers": 2 * CYCLE}
    (tmp_path / "config.json").write_text(json.dumps(config))
    one, other = (read_checkpoint(CheckpointSource(str(at))).about for at in (folder, tmp_path))
    assert one.fingerprint != other.fingerprint
    assert one.weights_fingerprint != other.weights_fingerprint


def test_an_exit_takes_the_first_layers_of_all(folder: Path) -> None:
    model = read_checkpoint(CheckpointSource(str(folder), part=ModelPart(exit=3))).model
    layers: Any = model.get_submodule("model.layers")
    assert len(layers) == 3
    assert layers[0].mlp.down_proj.weight is layers[2].mlp.down_proj.weight


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({CYCLES: 4}, "6 layers are no 4 cycles of a group"),
        ({CYCLES: 0}, "6 layers are no 0 cycles of a group"),
        ({CYCLES: "3"}, "6 layers are no '3' cycles of a group"),
        (
            {
                CYCLES: 3,
                "layer_types": ["full_attention"] * 5 + ["sliding_attention"],
                "model_type": "qwen3",
            },
            "its layer_types differ from cycle to cycle",
        ),
    ],
)
def test_cycles_that_cannot_be_are_named(
    folder: Path, tmp_path: Path, changed: dict[str, Any], sentence: str
) -> None:
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    config = json.loads((folder / "config.json").read_text()) | changed
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartupError, match=sentence) as caught:
        read_checkpoint(CheckpointSource(str(tmp_path)))
    assert CYCLES in str(caught.value)


def test_extra_embeddings_are_made_for_all_layers(folder: Path, tmp_path: Path) -> None:
    weights = read_checkpoint(CheckpointSource(str(folder))).about.weights_fingerprint
    rows = torch.zeros(2, 16)
    write_extra_embeddings(tmp_path, rows, MadeFor(weights))
    found = read_checkpoint(CheckpointSource(str(folder), extra_embeddings=str(tmp_path)))
    assert found.about.probe_tokens == len(rows)


def test_an_engine_that_does_not_know_of_cycles_is_named(folder: Path) -> None:
    with pytest.raises(StartupError, match=r"uses its layers several times .*ENGINE=vllm does not"):
        read_checkpoint(CheckpointSource(str(folder), device="meta"))


@torch.inference_mode()
def test_a_teacher_has_all_layers_and_a_drafter_is_refused(
    folder: Path, rows: torch.Tensor
) -> None:
    teacher = drafters.read_model(str(folder), torch.float32, torch.device("cpu"))
    assert torch.allclose(teacher(torch.tensor([TEXT])).logits[0], rows, atol=1e-5)
    with pytest.raises(StartupError, match="no such drafter is trained here"):
        drafters.read_drafter(str(folder))


def test_other_kinds_share_no_layers() -> None:
    config = GPTNeoXConfig(num_hidden_layers=4)
    setattr(config, CYCLES, 2)
    with pytest.raises(StartupError, match=r"\(gpt_neox\), layer_cycles: layers are shared in"):
        as_stored("some/model", config)

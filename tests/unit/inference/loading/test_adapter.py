"""A low-rank adapter is added to the weights when a checkpoint is read."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tandem.errors import StartupError
from tandem.inference.fingerprint import fingerprints
from tandem.inference.loading.adapter import CONFIG, WEIGHTS, merge_adapter
from tandem.inference.loading.checkpoint import CheckpointSource, read_checkpoint
from tandem.inference.loading.weights import read_model
from tests.support.models.architectures import LLAMA, build
from tests.support.models.parity import plain_logits, random_texts
from tests.support.models.trees import worst_of

# peft asks transformers by an old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    build(LLAMA).save_pretrained(folder)
    return folder


def loaded(checkpoint: Path) -> PreTrainedModel:
    return read_model(str(checkpoint), "cpu", "float32")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    """An adapter with random changes, written by peft."""
    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(1)
    config = LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "down_proj"])
    adapted = get_peft_model(build(LLAMA), config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(str(folder))
    own = json.loads((folder / CONFIG).read_text())
    own["tandem"] = {"made_for": fingerprints(loaded(checkpoint), "").weights}
    (folder / CONFIG).write_text(json.dumps(own))
    return folder


@pytest.fixture
def adapter(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "adapter")


def test_the_weights_have_the_changes(checkpoint: Path, adapter: Path) -> None:
    tensors = load_file(adapter / WEIGHTS)
    expected = loaded(checkpoint)
    with torch.no_grad():
        for name, parameter in expected.named_parameters():
            own = f"base_model.model.{name.removesuffix('.weight')}.lora_"
            if f"{own}A.weight" in tensors:  # W + B A x alpha / r
                parameter += 4 * tensors[f"{own}B.weight"] @ tensors[f"{own}A.weight"]
    texts = random_texts()
    found = merge_adapter(loaded(checkpoint), str(adapter))
    assert worst_of(plain_logits(build(LLAMA), texts), plain_logits(found, texts)) > 1
    assert worst_of(plain_logits(expected, texts), plain_logits(found, texts)) < 1e-4
    assert found.state_dict().keys() == expected.state_dict().keys()

    source = CheckpointSource(str(checkpoint), "cpu", "float32")
    plain = read_checkpoint(source)
    adapted = read_checkpoint(replace(source, adapter=str(adapter)))
    assert adapted.about.fingerprint != plain.about.fingerprint
    assert adapted.about.weights_fingerprint == fingerprints(found, "").weights


def without_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def torn(folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[: len(whole) // 2])


def for_another(folder: Path) -> None:
    own = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**own, "tandem": {"made_for": "ab" * 32}}))


def of_another_width(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file(
        {name: part[..., :1].contiguous() for name, part in tensors.items()}, folder / WEIGHTS
    )


def of_another_layer(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    renamed = {name.replace("layers.1", "layers.9"): part for name, part in tensors.items()}
    save_file(renamed, folder / WEIGHTS)


def no_json(folder: Path) -> None:
    (folder / CONFIG).write_text("{")


def prompts(folder: Path) -> None:
    kind = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 2, "task_type": "CAUSAL_LM"}
    (folder / CONFIG).write_text(json.dumps(kind))


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (without_weights, "no adapter in .*: there is no adapter_model.safetensors"),
        (torn, "cannot use the adapter .*: SafetensorError"),
        (for_another, "is for another model: its weights have the fingerprint abababababab"),
        (of_another_width, "cannot use the adapter .*: RuntimeError"),
        (of_another_layer, "does not fit the model: .* is missing"),
        (no_json, "cannot read .*adapter_config.json"),
        (prompts, "of the kind PROMPT_TUNING, which cannot be added to weights"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    checkpoint: Path, adapter: Path, spoil: object, sentence: str
) -> None:
    spoil(adapter)  # type: ignore[operator]
    with pytest.raises(StartupError, match=sentence) as error:
        merge_adapter(loaded(checkpoint), str(adapter))
    assert "\n" not in str(error.value)

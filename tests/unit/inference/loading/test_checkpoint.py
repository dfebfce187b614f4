"""A checkpoint is data: no code in it is run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.errors import StartupError
from tandem.failure import Misconfigured
from tandem.inference.loading.weights import read_model, read_tokenizer
from tandem.tools.local.pair import located
from tests.support.models.tiny import save_random_llama


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_random_llama(tmp_path / "model", 1)


@pytest.mark.parametrize("named", ["folder", "file"])
def test_a_gguf_file_alone_is_refused_with_what_to_do(named: str, tmp_path: Path) -> None:
    """By a service, and by `tandem up` before it starts one."""
    file = tmp_path / "own" / "model.Q4_1.gguf"
    file.parent.mkdir()
    file.touch()
    model = str(file if named == "file" else file.parent)
    advice = f"from_pretrained('{file.parent}', gguf_file='{file.name}', quantization_config="
    with pytest.raises(StartupError, match=re.escape(advice)):
        read_model(model, "cpu", "float32")
    with pytest.raises(Misconfigured, match=re.escape(advice)):
        located("target", model)


class Program:
    """What a pickle runs when it is read."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.trace,)


def test_safetensors_are_read(checkpoint: Path) -> None:
    assert read_model(str(checkpoint), "cpu", "float32").config.vocab_size == 5


@pytest.mark.parametrize("harmless", [True, False])
def test_a_pickle_is_not_read(harmless: bool, checkpoint: Path, tmp_path: Path) -> None:
    """Whatever it holds: good weights are refused as well."""
    weights = read_model(str(checkpoint), "cpu", "float32").state_dict()
    trace = tmp_path / "it ran"
    content = weights if harmless else {"program": Program(trace)}
    torch.save(content, checkpoint / "pytorch_model.bin")
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(StartupError, match="cannot load the model"):
        read_model(str(checkpoint), "cpu", "float32")
    assert not trace.exists()


@pytest.mark.parametrize("kind", ["llama", "unheard_of"])
def test_code_beside_the_weights_is_not_run(kind: str, checkpoint: Path, tmp_path: Path) -> None:
    trace = tmp_path / "it ran"
    (checkpoint / "own.py").write_text(f"import pathlib\npathlib.Path({str(trace)!r}).touch()\n")
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {
        "model_type": kind,
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    }
    (checkpoint / "config.json").write_text(json.dumps(config))
    tokenizer = {"auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    if kind == "llama":  # the library's own class is taken
        assert read_model(str(checkpoint), "cpu", "float32").config.vocab_size == 5
    else:
        with pytest.raises(StartupError, match="cannot load the model"):
            read_model(str(checkpoint), "cpu", "float32")
    with pytest.raises(StartupError, match="tokenizer"):
        read_tokenizer(str(checkpoint))
    assert not trace.exists()


def changed(checkpoint: Path, tensors: dict[str, torch.Tensor], **keys: Any) -> str:
    """The checkpoint, with more tensors and other keys in its configuration."""
    file = checkpoint / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, metadata={"format": "pt"})
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | keys))
    return str(checkpoint)


@pytest.mark.parametrize(
    ("names", "keys"),
    [
        pytest.param(["model.layers.0.self_attn.q_proj.weight_scale"], {}, id="scales"),
        pytest.param(
            ["fc.weight", "hidden_norm.weight"],
            {"architectures": ["DFlashDraftModel"]},
            id="DFlash",
        ),
        pytest.param(["mask_hidden"], {"architectures": ["PEagleDraftModel"]}, id="P-EAGLE"),
        pytest.param([f"model.layers.{i}.mlp.x" for i in (7, 8, 9, 10)], {}, id="more layers"),
    ],
)
def test_weights_without_a_place_are_refused(
    names: list[str], keys: dict[str, Any], checkpoint: Path
) -> None:
    model = changed(checkpoint, {name: torch.ones(1) for name in names}, **keys)
    with pytest.raises(StartupError, match="no place for, and that would be left out") as refused:
        read_model(model, "cpu", "float32")
    assert names[0] in str(refused.value)
    assert next(iter(keys.get("architectures", ["LlamaForCausalLM"]))) in str(refused.value)
    assert ("and 1 more" in str(refused.value)) == (len(names) > 3)


def test_what_no_logit_depends_on_may_be_left_out(checkpoint: Path) -> None:
    layers = json.loads((checkpoint / "config.json").read_text())["num_hidden_layers"]
    names = [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "mtp.layers.0.x",
        "model.visual.blocks.0.x",
        "vision_tower.x",
        f"model.layers.{layers}.eh_proj.weight",
    ]
    model = changed(checkpoint, {name: torch.ones(1) for name in names}, num_nextn_predict_layers=1)
    assert read_model(model, "cpu", "float32").config.vocab_size == 5


@pytest.mark.parametrize(
    ("quantised", "sentence"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "'modelopt', which transformers does"),
        ({"quant_method": "fp8"}, "'fp8', which needs a GPU"),
    ],
)
def test_quantised_weights_that_cannot_be_computed_are_refused(
    quantised: dict[str, Any], sentence: str, checkpoint: Path
) -> None:
    model = changed(checkpoint, {}, quantization_config=quantised)
    with pytest.raises(StartupError, match=sentence):
        read_model(model, "cpu", "float32")

"""A checkpoint is data: no code in it is run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tandem.errors import StartupError
from tandem.failure import Misconfigured
from tandem.inference.loading.checkpoint import read_model, read_tokenizer
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
    advice = rf"GGUF file.*from_pretrained\('{file.parent}', gguf_file='{file.name}'\)"
    with pytest.raises(StartupError, match=advice):
        read_model(model, "cpu", "float32")
    with pytest.raises(Misconfigured, match=advice):
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

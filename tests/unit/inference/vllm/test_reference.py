"""The plain model that vLLM's rows are compared with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from tandem.errors import StartupError
from tandem.inference.check import plain as rows_of
from tandem.inference.fingerprint import Fingerprints, fingerprints
from tandem.inference.loading.weights import read_model
from tandem.inference.vllm.arguments import VllmOptions
from tandem.inference.vllm.reference import Reference, reference_of
from tests.support.models.tiny import VOCAB_SIZE, save_random_llama


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_random_llama(tmp_path / "plain", 1)


def hashes(reference: Reference) -> Fingerprints:
    about = reference.checkpoint.about
    return Fingerprints(about.fingerprint, about.weights_fingerprint)


def test_it_is_the_model_of_other_engines(checkpoint: Path) -> None:
    found = reference_of(VllmOptions(str(checkpoint)), "float32")
    assert hashes(found) == fingerprints(read_model(str(checkpoint), "cpu", "float32"), "")
    assert found.expected is not None
    assert found.expected.logits.rows.shape == (2, 144, VOCAB_SIZE)


def test_the_text_fits_into_a_sequence_and_a_pass(checkpoint: Path) -> None:
    for options in (
        VllmOptions(str(checkpoint), max_length=100),
        VllmOptions(str(checkpoint), largest_pass=100),
    ):
        found = reference_of(options, "float32")
        assert found.expected is not None
        assert len(found.expected.texts.first) == 100


def test_a_model_with_too_much_noise_is_served_unchecked(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_of, "_MOST_NOISE", {torch.float32: -1.0})
    with capture_logs() as logs:
        found = reference_of(VllmOptions(str(checkpoint)), "float32")
    assert found.expected is None
    (warning,) = [line for line in logs if line["log_level"] == "warning"]
    assert "leaves nothing to compare" in warning["reason"]


def test_what_changes_the_logits_is_another_law_of_the_same_weights(checkpoint: Path) -> None:
    plain = reference_of(VllmOptions(str(checkpoint)), "float32")
    others = [
        reference_of(VllmOptions(str(checkpoint), quantization="fp8"), "float32"),
        reference_of(VllmOptions(str(checkpoint), further={"kv_cache_dtype": "fp8"}), "float32"),
    ]
    assert len({hashes(each).model for each in (plain, *others)}) == 3
    assert {hashes(each).weights for each in others} == {hashes(plain).weights}
    assert others[0].expected is None


def test_quantised_weights_are_described_without_being_loaded(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (checkpoint / "config.json").write_text(json.dumps(config))
    found = reference_of(VllmOptions(str(checkpoint)), "float16")
    assert found.expected is None
    assert found.checkpoint.model.device.type == "meta"
    assert hashes(found).model
    assert hashes(found) == hashes(reference_of(VllmOptions(str(checkpoint)), "float16"))
    for file in checkpoint.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(StartupError, match=r"no folder with \*\.safetensors"):
        reference_of(VllmOptions(str(checkpoint)), "float16")

"""What a model's fingerprint tells apart, and what it does not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.errors import Unavailable
from tandem.inference.loading.checkpoint import CheckpointSource, read_checkpoint
from tandem.serving.fingerprint import fingerprint_of, require_same

DRAFTER = Path("models/drafter")


def of(folder: Path, dtype: str = "float32") -> str:
    return read_checkpoint(CheckpointSource(str(folder), "cpu", dtype)).about.fingerprint


@pytest.fixture(scope="module")
def original() -> str:
    return of(DRAFTER)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DRAFTER, tmp_path / "of-another-name"))


def test_that_of_the_weights_is_the_same_in_float32_and_bfloat16(original: str, copy: Path) -> None:
    """A head is made for weights, whoever computes them; rounded to bfloat16 they are the same."""
    whole, half, least = (
        read_checkpoint(CheckpointSource(str(copy), "cpu", dtype))
        for dtype in ("float32", "bfloat16", "float16")
    )
    assert whole.about.fingerprint == original
    assert whole.about.weights_fingerprint == half.about.weights_fingerprint
    assert len({one.about.fingerprint for one in (whole, half, least)}) == 3
    assert whole.about.weights_fingerprint not in ("", whole.about.fingerprint)
    model = AutoModelForCausalLM.from_pretrained(copy, dtype="auto")
    with torch.no_grad():
        model.get_input_embeddings().weight[0] *= 1.1
    model.save_pretrained(copy)
    changed = read_checkpoint(CheckpointSource(str(copy), "cpu", "bfloat16"))
    assert changed.about.weights_fingerprint != half.about.weights_fingerprint


def test_a_copy_has_the_same(original: str, copy: Path) -> None:
    assert of(copy) == original
    assert len(original) == 64


def test_files_may_be_split_in_any_way(original: str, copy: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(copy, dtype="auto")
    for file in copy.glob("*.safetensors"):
        file.unlink()
    model.save_pretrained(copy, max_shard_size="500KB")
    assert len(list(copy.glob("*.safetensors"))) > 1
    assert of(copy) == original


def test_one_weight_changes_it(original: str, copy: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(copy, dtype="auto")
    with torch.no_grad():
        weight = list(model.parameters())[-1].reshape(-1)
        weight[-1] = weight[-1] * 2 + 1
    model.save_pretrained(copy)
    assert of(copy) != original


def test_two_rows_that_change_places_change_it(original: str, copy: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(copy, dtype="auto")
    with torch.no_grad():
        rows = model.get_input_embeddings().weight
        rows[[5, 6]] = rows[[6, 5]].clone()
    model.save_pretrained(copy)
    assert of(copy) != original


@pytest.mark.parametrize(
    ("file", "field", "value"),
    [
        ("config.json", "rms_norm_eps", 0.5),
        ("config.json", "rope_parameters", {"rope_theta": 99.0, "rope_type": "default"}),
        ("generation_config.json", "eos_token_id", 3),
    ],
)
def test_what_is_computed_with_the_weights_changes_it(
    original: str, copy: Path, file: str, field: str, value: object
) -> None:
    path = copy / file
    written = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(written | {field: value}))
    assert of(copy) != original


def test_another_dtype_changes_it(original: str) -> None:
    assert of(DRAFTER, "bfloat16") != original


def test_the_order_and_the_kind_of_parts_count() -> None:
    assert fingerprint_of("a", "b") != fingerprint_of("b", "a")
    assert fingerprint_of("ab") != fingerprint_of("a", "b")
    assert fingerprint_of("1") != fingerprint_of(1.0)


def test_a_caller_who_counts_on_another_one_is_refused() -> None:
    require_same("", "abc")
    require_same("abc", "abc")
    with pytest.raises(Unavailable, match=r"open\.fingerprint: xyz is expected .* is abc"):
        require_same("xyz", "abc")

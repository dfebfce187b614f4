"""A head is known by its files; what is wrong with them is one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.errors import StartupError
from tandem.inference.heads.files import head_files
from tandem.inference.heads.load import FAMILIES, load_head
from tandem.inference.kv.size import Room
from tandem.inference.loading.checkpoint import CheckpointSource
from tests.support.models.heads import save_random_head
from tests.support.models.tiny import random_llama, save_random_llama
from tests.support.repository import ROOT


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return save_random_llama(tmp_path / "target", 1)


def loaded(head: Path, family: str, target: str | Path) -> Any:
    return load_head(CheckpointSource(str(head)), family, str(target), Room(128, 128))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_is_known_by_its_files(family: str, target: Path, tmp_path: Path) -> None:
    folder = save_random_head(tmp_path / "head", family, target)
    files = head_files(str(folder))
    assert files is not None
    assert (files.family, files.feedback(1)) == (family, "last")
    head = loaded(folder, family, target)
    assert (head.reads, head.hidden_size, head.vocab_size) == ((2,), 16, 5)
    assert [count for count, _, _ in head.pass_times] == [1, 4, 16]
    assert head.made_for == ""


@pytest.mark.parametrize("folder", [ROOT / "models" / "target", Path("nowhere"), Path("gpt2")])
def test_other_folders_are_no_heads(folder: Path) -> None:
    assert head_files(str(folder)) is None


def _torn(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


def _without_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "medusa_lm_head.pt")


def _gone(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _renamed(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    named = {f"x.{name}": tensor for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors")


def _other_shape(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["0.0.linear.weight"] = torch.zeros(16, 8)
    save_file(
        {k: v for k, v in tensors.items() if k != "1.0.linear.weight"}, folder / "model.safetensors"
    )


def _no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (_torn, "cannot read the head's weights"),
        (_without_header, "cannot read the"),
        (_pickled, "medusa_lm_head.pt, a pickle, which can run code; convert it"),
        (_gone, "has no weights, *.safetensors"),
        (_renamed, "has not Medusa's weights: looked for HEAD.LAYER.linear.weight"),
        (_other_shape, "Medusa's"),
        (_no_json, "cannot read"),
    ],
)
def test_what_is_wrong_is_named(
    harm: Callable[[Path], None], sentence: str, target: Path, tmp_path: Path
) -> None:
    folder = save_random_head(tmp_path / "head", "medusa", target)
    harm(folder)
    with pytest.raises(StartupError) as caught:
        loaded(folder, "medusa", target)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_head_of_another_family_is_named(target: Path, tmp_path: Path) -> None:
    folder = save_random_head(tmp_path / "head", "medusa", target)
    with pytest.raises(StartupError, match="is a medusa head: set METHOD=medusa"):
        loaded(folder, "eagle", target)
    with pytest.raises(StartupError, match="is no head: one of medusa is a folder with a config"):
        loaded(target, "medusa", target)
    with pytest.raises(StartupError, match=r"has no config\.json: one of eagle is a folder with"):
        loaded(tmp_path / "nowhere", "eagle", target)


def test_what_a_head_lacks_is_its_targets(target: Path, tmp_path: Path) -> None:
    folder = save_random_head(tmp_path / "head", "eagle", target)
    with pytest.raises(StartupError, match="has no embedding: name its target's checkpoint"):
        loaded(folder, "eagle", "")
    with pytest.raises(StartupError, match="cannot read the head's target"):
        loaded(folder, "eagle", tmp_path / "nowhere")
    medusa = save_random_head(tmp_path / "other", "medusa", target)
    with pytest.raises(StartupError, match="does not say for which target it is"):
        loaded(medusa, "medusa", "")
    whole = load_file(target / "model.safetensors")
    head = loaded(folder, "eagle", target)
    assert torch.equal(head._embedding, whole["model.embed_tokens.weight"])
    assert torch.equal(head._output, whole["lm_head.weight"])


def test_a_target_may_be_in_several_files(tmp_path: Path) -> None:
    target = tmp_path / "target"
    random_llama(1).save_pretrained(target, max_shard_size="2KB")
    assert len(list(target.glob("*.safetensors"))) > 1
    folder = save_random_head(tmp_path / "head", "eagle", target)
    head = loaded(folder, "eagle", target)
    model = random_llama(1)
    assert torch.equal(head._embedding, model.get_input_embeddings().weight)
    assert torch.equal(head._output, model.get_output_embeddings().weight)


def test_a_head_for_another_width_is_refused(target: Path, tmp_path: Path) -> None:
    folder = save_random_head(tmp_path / "head", "medusa", target)
    other = tmp_path / "wide"
    other.mkdir()
    config = json.loads((target / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"hidden_size": 32}))
    with pytest.raises(StartupError, match="reads hidden states of 16 numbers, and its target has"):
        loaded(folder, "medusa", other)


@pytest.mark.parametrize("family", ["hydra", "eagle"])
def test_other_heads_for_another_width_are_refused_too(
    family: str, target: Path, tmp_path: Path
) -> None:
    folder = save_random_head(tmp_path / "head", family, target)
    wide = save_random_llama(tmp_path / "wide", 1)
    config = json.loads((wide / "config.json").read_text())
    (wide / "config.json").write_text(json.dumps(config | {"hidden_size": 32}))
    with pytest.raises(
        StartupError, match=r"16 numbers, and its target has 32|cannot be loaded as"
    ):
        loaded(folder, family, wide)


def test_a_vocabulary_of_its_own_must_be_named(target: Path, tmp_path: Path) -> None:
    folder = save_random_head(tmp_path / "head", "eagle", target)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = torch.zeros(3, 16)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        StartupError, match=r"3 rows of lm_head\.weight, 5 of the embedding, and no"
    ):
        loaded(folder, "eagle", target)


def test_a_device_that_is_not_there_is_named(target: Path, tmp_path: Path) -> None:
    folder = save_random_head(tmp_path / "head", "medusa", target)
    with pytest.raises(StartupError, match="cannot use the device 'nowhere'"):
        load_head(CheckpointSource(str(folder), "nowhere"), "medusa", str(target), Room(8, 8))


def test_layers_of_a_fused_head_follow_from_its_target(target: Path, tmp_path: Path) -> None:
    folder = save_random_head(tmp_path / "head", "eagle", target)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        tensors | {"midlayer.hidden_norm.weight": torch.ones(1)}, folder / "model.safetensors"
    )
    files = head_files(str(folder))
    assert files is not None
    assert files.is_fused
    assert (files.layers_of(32), files.feedback(32)) == ((2, 16, 29), "2,16,29")
    with pytest.raises(StartupError, match=r"reads the layers \[2, 2, 2\] of a target with 5"):
        files.layers_of(5)
    with pytest.raises(StartupError, match="set TANDEM_TARGET_FEEDBACK"):
        files.feedback(0)


_IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        pytest.param({_IDS: [2, 16, 29]}, (2, 16, 29), id="the authors"),
        pytest.param(
            {"speculators_model_type": "eagle3", _IDS: [2, 16, 29]}, (2, 16, 29), id="speculators"
        ),
        pytest.param({"eagle_config": {_IDS: [1, 15, 28]}}, (2, 16, 29), id="SpecForge"),
        pytest.param(
            {"eagle_config": {_IDS: [1, 15, 28], "use_aux_hidden_state": True}},
            (2, 16, 29),
            id="NVIDIA",
        ),
        pytest.param({"eagle_config": {}}, (2, 16, 29), id="names none"),
        pytest.param(
            {"eagle_config": {_IDS: [1, 15, 28]}, "tandem": {"layers": [1, 15, 28]}},
            (1, 15, 28),
            id="our key",
        ),
        pytest.param({_IDS: [2, 16, 29], "tandem": {"layers": [3, 4]}}, (3, 4), id="our key, flat"),
    ],
)
def test_publishers_number_layers_in_their_ways(
    keys: dict[str, Any], layers: tuple[int, ...], target: Path, tmp_path: Path
) -> None:
    folder = save_random_head(tmp_path / "head", "eagle", target)
    tensors = load_file(folder / "model.safetensors")
    tensors["midlayer.hidden_norm.weight"] = torch.ones(1)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))
    files = head_files(str(folder))
    assert files is not None
    assert files.layers_of(32) == layers
    assert files.feedback(32) == ",".join(map(str, layers))


@pytest.mark.parametrize(
    ("family", "more", "named"),
    [
        pytest.param("eagle", {"fc_norm.0.weight": 16}, "fc_norm.0.weight", id="EAGLE-3.1"),
        pytest.param("eagle", {"input_norm.weight": 48}, "input_norm.weight", id="norm_before_fc"),
        pytest.param(
            "eagle", {"layers.1.mlp.down_proj.weight": 16}, "layers.1.mlp", id="a second layer"
        ),
        pytest.param("eagle", {"mask_hidden": 48}, "mask_hidden", id="one layer of P-EAGLE"),
        pytest.param("medusa", {"token_map": 5}, "token_map", id="Medusa's own vocabulary"),
        pytest.param("hydra", {"prefix_embeding_layer.layers.1.x": 5}, "layers.1.x", id="Hydra"),
    ],
)
def test_tensors_without_a_place_are_named(
    family: str, more: dict[str, int], named: str, target: Path, tmp_path: Path
) -> None:
    folder = save_random_head(tmp_path / "head", family, target)
    tensors = load_file(folder / "model.safetensors")
    own = {name: torch.ones(size) for name, size in more.items()}
    save_file({**tensors, **own}, folder / "model.safetensors")
    with pytest.raises(StartupError, match=rf"none of {family}'s .*{named}.* would be left out"):
        loaded(folder, family, target)
    harmless = {"t2d": torch.ones(5)}
    save_file({**tensors, **harmless}, folder / "model.safetensors")
    loaded(folder, family, target)


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {}}, "DFlashDraftModel"),
        ({"dflash_config": {"block_size": 16}}, "dflash"),
        ({"speculators_model_type": "peagle"}, "peagle"),
        ({"architectures": ["PEagleDraftModel"]}, "PEagleDraftModel"),
    ],
)
def test_a_drafter_of_another_kind_is_named(
    keys: dict[str, Any], kind: str, target: Path, tmp_path: Path
) -> None:
    folder = save_random_head(tmp_path / "head", "eagle", target)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))
    with pytest.raises(StartupError, match=f"is a drafter of the kind {kind}, which Tandem"):
        head_files(str(folder))

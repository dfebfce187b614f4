"""A part of a model computes what the whole model computes if the other sublayers add nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tandem.errors import StartupError
from tandem.inference.fingerprint import fingerprints
from tandem.inference.loading.partial import ModelPart, take_part
from tests.support.decoders import decoder_over
from tests.support.models.architectures import SUPPORTED, Architecture, build
from tests.support.models.parity import (
    TOLERANCE,
    differences,
    plain_logits,
    ragged_rows,
    random_texts,
)
from tests.support.models.trees import narrow, plain_rows, random_trees, tree_rows, worst_of

BY_OPENVINO = pytest.mark.campaign(
    "parts by OpenVINO, of every family, compute what the whole would",
    "Llama by OpenVINO; every family by torch (this file)",
)

LAYERS = 4
TAKEN = [row for row in SUPPORTED if row.model_type in ("llama", "mistral", "qwen2", "qwen3")]
# Each by torch, one by OpenVINO; all in a campaign.
CASES = [
    pytest.param(
        row,
        engine,
        id=f"{row.model_type}-{engine}",
        marks=BY_OPENVINO if engine == "openvino" and row is not TAKEN[0] else (),
    )
    for row in TAKEN
    for engine in ("torch", "openvino")
]
REFUSED = next(row for row in SUPPORTED if row.model_type == "gpt2")
# Attention, MLP, and a whole layer; the first layer that is left has no attention.
SKIPPED = {"attention": [0, 2], "mlp": [1, 2]}
EXIT = {"attention": [3], "mlp": [3]}


def whole(row: Architecture, **options: Any) -> PreTrainedModel:
    options = {"num_hidden_layers": LAYERS, **options}
    if "layer_types" in row.options:
        options["layer_types"] = ["sliding_attention", "full_attention"] * (LAYERS // 2)
    return build(row, **options)


def reference(model: PreTrainedModel, skipped: dict[str, list[int]]) -> PreTrainedModel:
    """The whole model, whose sublayers add zeros."""
    with torch.no_grad():
        for number, layer in enumerate(model.get_submodule("model.layers")):
            for name, part in (("attention", "self_attn.o_proj"), ("mlp", "mlp.down_proj")):
                if number in skipped[name]:
                    for parameter in layer.get_submodule(part).parameters():
                        parameter.zero_()
    return model


def skip_file(folder: Path, skipped: dict[str, Any]) -> ModelPart:
    path = folder / "skip.json"
    path.write_text(json.dumps(skipped))
    return ModelPart(skip=str(path))


@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize("cut", ["exit", "skip"])
@pytest.mark.parametrize(("row", "engine"), CASES)
def test_a_part_is_the_model_without_the_other_sublayers(
    row: Architecture, cut: str, engine: Any, tmp_path: Path
) -> None:
    skipped = EXIT if cut == "exit" else SKIPPED
    model, texts = whole(row), random_texts()
    expected = plain_logits(reference(whole(row), skipped), texts)
    assert worst_of(plain_logits(model, texts), expected) > 1, "what is left out adds too little"
    take_part(model, ModelPart(exit=3) if cut == "exit" else skip_file(tmp_path, skipped))
    decoder = decoder_over(model, "part", cache_tokens=256, engine=engine, states_of="1,last")
    assert decoder.engine == engine
    found, _ = ragged_rows(decoder, texts)
    assert float(differences(expected, found).max()) < TOLERANCE


@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize(("row", "engine"), CASES)
def test_its_branches_are_its_texts(row: Architecture, engine: Any, tmp_path: Path) -> None:
    """OpenVINO leaves trees of models with windows to torch."""
    trees = random_trees(1)
    expected = plain_rows(reference(whole(row, **narrow(row)), SKIPPED), trees)
    model = whole(row, **narrow(row))
    take_part(model, skip_file(tmp_path, SKIPPED))
    decoder = decoder_over(model, "part", cache_tokens=1024, engine=engine, trees=row.slides)
    assert worst_of(expected, tree_rows(decoder, trees)) < TOLERANCE


@pytest.mark.parametrize(
    ("attention", "mlp"),
    [([0], [1, 2, 3]), ([0, 2], [1]), ([1], [0, 2]), ([], [1, 2]), ([3], [0]), ([], [])],
)
def test_each_attention_that_is_left_has_a_slot_of_its_own(
    attention: list[int], mlp: list[int], tmp_path: Path
) -> None:
    """In the order of the layers, whatever is left of each."""
    model = whole(TAKEN[0])
    take_part(model, skip_file(tmp_path, {"attention": attention, "mlp": mlp}))
    layers: Any = model.get_submodule("model.layers")
    slots = [layer.self_attn.layer_idx for layer in layers if layer.self_attn is not None]
    assert slots == list(range(LAYERS - len(attention)))


def test_what_is_left_out_is_not_kept(tmp_path: Path) -> None:
    row = TAKEN[0]
    model = whole(row)
    count, before = sum(p.numel() for p in model.parameters()), fingerprints(model, "")
    layer = sum(p.numel() for p in model.get_submodule("model.layers.0").parameters())
    take_part(model, ModelPart(exit=2))
    assert sum(p.numel() for p in model.parameters()) == count - 2 * layer
    decoder = decoder_over(model, "part", cache_tokens=64)
    assert decoder.about.layers == 2
    full = decoder_over(whole(row), "whole", cache_tokens=64)
    assert 2 * decoder.pool.bytes_per_position == full.pool.bytes_per_position
    # Another part is another model.
    others = [whole(row), whole(row)]
    take_part(others[0], skip_file(tmp_path, {"attention": [0], "mlp": []}))
    take_part(others[1], skip_file(tmp_path, {"attention": [1], "mlp": []}))
    hashes = {before, *(fingerprints(other, "") for other in [model, *others])}
    assert len(hashes) == 4


def test_all_layers_are_the_model() -> None:
    model, texts = whole(TAKEN[0]), random_texts()
    expected = plain_logits(model, texts)
    take_part(model, ModelPart(exit=LAYERS))
    assert worst_of(expected, plain_logits(model, texts)) == 0


@pytest.mark.parametrize(
    ("row", "part", "sentence"),
    [
        (TAKEN[0], ModelPart(exit=LAYERS + 1), r"exit = 5: the model has 4 layers"),
        (REFUSED, ModelPart(exit=1), r"no part of GPT2LMHeadModel can be served: .*llama, mistral"),
        (TAKEN[0], ModelPart(skip="none.json"), r"cannot read the skip file 'none.json': No such"),
    ],
)
def test_what_is_no_part_is_refused(row: Architecture, part: ModelPart, sentence: str) -> None:
    model = whole(row) if row is not REFUSED else build(row)
    with pytest.raises(StartupError, match=sentence):
        take_part(model, part)


ALL: Sequence[int] = list(range(LAYERS))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"attention": ALL, "mlp": ALL}, "no attention is left of the model"),
        ({"attention": ALL, "mlp": []}, "no attention is left of the model"),
        ({"attention": [4], "mlp": []}, "attention names layer 4; the model's layers are 0 to 3"),
        ({"attention": [], "mlp": [-1]}, "mlp names layer -1; the model's"),
        ({"attention": [], "mlp": [], "made_for": "ab" * 32}, "is for another model, .* abababab"),
        ({"attention": [1]}, r"is no skip file: .* \(KeyError: 'mlp'\)"),
        ([], r"is no skip file: .*\(TypeError"),
        ({"attention": [1.7], "mlp": []}, r"is no skip file: .*no list of integers"),
        ({"attention": [], "mlp": "12"}, r"is no skip file: .*no list of integers"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(content: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=sentence) as error:
        take_part(whole(TAKEN[0]), skip_file(tmp_path, content))
    assert "\n" not in str(error.value)


def test_a_file_is_bound_to_its_model(tmp_path: Path) -> None:
    model = whole(TAKEN[0])
    made_for = fingerprints(model, "").weights
    take_part(model, skip_file(tmp_path, {"attention": [1], "mlp": [], "made_for": made_for}))
    assert model.config.num_hidden_layers == LAYERS

"""The drafter of the zoo that `tandem distill` made."""

from __future__ import annotations

import json

from safetensors import safe_open

from tests.support.repository import ROOT

MODELS = ROOT / "models"


def test_it_is_another_drafter_of_the_embedded_target() -> None:
    tokenizers = [
        json.loads((MODELS / name / "tokenizer.json").read_text())
        for name in ("target", "distilled")
    ]
    assert tokenizers[0] == tokenizers[1]
    before, after = (
        safe_open(MODELS / name / "model.safetensors", "pt") for name in ("drafter", "distilled")
    )
    assert set(before.keys()) == set(after.keys())
    for name in before.keys():  # noqa: SIM118
        assert before.get_slice(name).get_shape() == after.get_slice(name).get_shape()
    name = "model.embed_tokens.weight"
    assert not before.get_tensor(name).equal(after.get_tensor(name))


def test_its_card_says_what_it_gained() -> None:
    card = (MODELS / "distilled" / "README.md").read_text()
    readme = (MODELS / "README.md").read_text()
    for line in (
        "0.737 \u00b1 0.010 | 0.741 \u00b1 0.010",
        "0.666 \u00b1 0.010 | 0.670 \u00b1 0.010",
    ):
        assert line in card
        assert line in readme

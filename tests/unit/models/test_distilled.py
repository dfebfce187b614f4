"""The drafter of the zoo that `tandem distill` made."""

from __future__ import annotations

import json

from safetensors.torch import load_file

from tests.support.repository import ROOT

MODELS = ROOT / "models"


def test_it_is_another_drafter_of_the_embedded_target() -> None:
    target, own = (
        json.loads((MODELS / name / "tokenizer.json").read_text())
        for name in ("target", "distilled")
    )
    assert own == target
    before, after = (
        load_file(MODELS / name / "model.safetensors") for name in ("drafter", "distilled")
    )
    assert {n: part.shape for n, part in after.items()} == {
        n: part.shape for n, part in before.items()
    }
    assert all(not after[name].equal(part) for name, part in before.items())


def test_the_page_has_the_figures_of_its_card() -> None:
    card = (MODELS / "distilled" / "README.md").read_text()
    page = (MODELS / "README.md").read_text()
    figures = ["0.737 ± 0.010 | 0.741 ± 0.010", "0.666 ± 0.010 | 0.670 ± 0.010"]
    assert all(line in card and line in page for line in figures)

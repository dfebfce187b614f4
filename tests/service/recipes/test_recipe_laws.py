"""Recipes beyond the table's built-in ones, through real sockets: the law, and greedy texts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from drafter_svc.settings import DrafterSettings
from tandem.retrieval.build import write_index
from target_svc.settings import TargetSettings
from tests.service.recipes.served_law import greedy_summaries
from tests.support.models.tiny import VOCAB_SIZE

OTHERS = pytest.mark.campaign(
    "the law through sockets: retrieval in two stores, a part that stops early",
    "a cascade over `horizontal` over a part and `lookup` (this file); the enumeration of each",
)

CASCADE = """
method = "cascade"
rule = "token"
tokens = 2
[inner]
method = "horizontal"
tokens = [1]
[[inner.parts]]
method = "model"
model = "{large}"
skip = "{skip}"
[[inner.parts]]
method = "lookup"
"""
RETRIEVAL = """
method = "retrieval"
stores = ["prompt", "corpus"]
index = "{index}"
max_nodes = 6
"""
PART = """
method = "model"
model = "{large}"
skip = "{skip}"
stop = "adaptive"
threshold = 0.3
"""
RECIPES = {"cascade": (CASCADE, 0), "retrieval": (RETRIEVAL, 6), "part, adaptive": (PART, 0)}


def recipe_in(folder: Path, text: str, large: Path) -> str:
    """A recipe's file, with what it names."""
    skip, index = folder / "skip.json", folder / "index"
    skip.write_text(json.dumps({"attention": [], "mlp": [0]}))
    rng = np.random.default_rng(1)
    write_index(index, rng.integers(VOCAB_SIZE, size=400), VOCAB_SIZE, "")
    file = folder / "recipe.toml"
    file.write_text(text.format(large=large, skip=skip, index=index))
    return str(file)


@pytest.mark.parametrize(
    "name", ["cascade", *(pytest.param(n, marks=OTHERS) for n in [*RECIPES][1:])]
)
async def test_texts_follow_the_targets_law(
    name: str, random_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    text, nodes = RECIPES[name]
    small, large = random_pair
    settings = DrafterSettings(recipe=recipe_in(tmp_path, text, large), model=str(small))
    target = TargetSettings(model=str(large))
    found = await greedy_summaries(settings, target, small, nodes)
    assert all(summary.drafted_tokens for summary in found)

"""Branches of a sequence: every path of a tree has the logits of its own plain pass."""

from __future__ import annotations

import random

import pytest

from tandem.inference.decoder import Decoder
from tests.architectures import SUPPORTED, Architecture, build
from tests.parity import TOLERANCE
from tests.trees import NARROW, Tree, plain_rows, tree_rows, worst_of

every_architecture = pytest.mark.parametrize("row", SUPPORTED, ids=lambda row: row.model_type)


def narrow(row: Architecture) -> dict[str, int]:
    """A window that ends within the trees."""
    return {"sliding_window": NARROW} if row.slides else {}


@every_architecture
def test_paths_of_trees_give_their_plain_logits_and_go_on_when_kept(row: Architecture) -> None:
    model, rng = build(row, **narrow(row)), random.Random(1)
    trees = [Tree.random(rng) for _ in range(20)]
    assert max(len(tree.path) for tree in trees) > NARROW + 2
    expected = plain_rows(model, trees)
    decoder = Decoder(model, row.name, cache_tokens=1024)
    assert decoder.takes_trees
    groups = [trees[:5], trees[5:6], trees[6:]]
    found = [rows for group in groups for rows in tree_rows(decoder, group)]
    assert worst_of(expected, found) < TOLERANCE


CONVERTED = [row for row in SUPPORTED if row.model_type != "gemma2"]


@pytest.mark.parametrize("row", CONVERTED, ids=lambda row: row.model_type)
def test_openvino_gives_them_too_or_leaves_trees_to_torch(row: Architecture) -> None:
    pytest.importorskip("openvino")
    model, rng = build(row, **narrow(row)), random.Random(2)
    trees = [Tree.random(rng, 40) for _ in range(20)]
    expected = plain_rows(model, trees)
    decoder = Decoder(model, row.name, cache_tokens=2048, engine="openvino")
    assert decoder.engine == "openvino"
    if not row.slides:
        found = [*tree_rows(decoder, trees[:5]), *tree_rows(decoder, trees[5:])]
        assert worst_of(expected, found) < TOLERANCE

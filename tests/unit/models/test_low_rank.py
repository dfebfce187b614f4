"""What is trained as an adapter is what a service merges."""

from __future__ import annotations

from pathlib import Path

import torch

from models.zoo.training import texts
from models.zoo.training.low_rank import LowRank, adapted
from tandem.inference.fingerprint import fingerprints
from tandem.inference.loading.adapter import merge_adapter
from tandem.inference.loading.weights import read_model
from tests.support.repository import ROOT

PAIR = ROOT / "models"


def test_a_published_adapter_gives_the_trained_weights(tmp_path: Path) -> None:
    base = texts.frozen(PAIR, "target")
    model = LowRank(base)
    with torch.no_grad():
        for up in model.up:
            up.normal_(std=0.02)
    expected = model.weights()
    model.publish(tmp_path / "adapter", PAIR, {"exit": 3})
    found = adapted(PAIR, tmp_path / "adapter")
    assert found.keys() == expected.keys()
    changed = 0
    for name, weight in expected.items():
        change = (weight - base[name]).abs().max()
        changed += bool(change > 0)
        assert (found[name] - weight).abs().max() <= 0.02 * change + 1e-6, name
    assert changed == len(model.names) == 7 * 5


def test_the_committed_adapter_is_for_the_committed_target() -> None:
    target = read_model(str(PAIR / "target"), "cpu", "float32")
    before = fingerprints(target, "").weights
    merged = merge_adapter(target, str(PAIR / "layerskip"))
    assert fingerprints(merged, "").weights != before

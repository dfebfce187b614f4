"""A head's training that was cut gives the file of one that was not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models import llama, loop
from models.loop import Stage
from models.zoo.heads import eagle, hydra, medusa, mtp
from models.zoo.training import heads, texts
from tests.support.repository import ROOT

OTHERS = pytest.mark.campaign(
    "a training of any head that was cut gives the same file",
    "`medusa` and `eagle` (this file)",
)

STEPS = 3  # of each stage
KINDS: dict[str, Callable[[], heads.Training]] = {
    "medusa": medusa.training,
    "mtp": mtp.training,
    "hydra": lambda: hydra.training(plus=False),
    "hydra-plus": lambda: hydra.training(plus=True),
    "eagle": lambda: eagle.training(fused=False),
    "eagle-fused": lambda: eagle.training(fused=True),
}


class CutError(Exception):
    pass


class Drawing:
    """Batches that follow from the step; the run ends at one of them."""

    def __init__(self) -> None:
        self.drawn = 0
        self.last: int | None = None

    def __call__(self, stage: Stage, step: int) -> Tensor:
        if self.drawn == self.last:
            raise CutError
        self.drawn += 1
        made = torch.Generator().manual_seed(step)
        shape = (stage.rows, stage.length + 1)
        return torch.randint(llama.TARGET.vocab_size, shape, generator=made)


# One that learns rows, and one that unrolls a layer.
CUT = [pytest.param(kind, marks=() if kind in ("medusa", "eagle") else OTHERS) for kind in KINDS]


@pytest.mark.parametrize("kind", CUT)
def test_a_run_that_goes_on_ends_as_one_that_was_never_cut(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = Drawing()

    def compiled(objective: Any, **options: Any) -> Any:
        return objective

    monkeypatch.setattr(texts, "mixed", lambda *of: draw)
    monkeypatch.setattr(torch, "compile", compiled)
    # Muon multiplies in bfloat16, which takes minutes without instructions for it.
    orthogonal = "torch.optim._muon._zeropower_via_newtonschulz"
    monkeypatch.setattr(orthogonal, lambda update, *of: update)
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", -1.0)  # one each step

    def fit(place: Path) -> None:
        training = KINDS[kind]()
        stages = [replace(s, steps=STEPS, rows=2, length=16) for s in training.stages]
        place.mkdir(exist_ok=True)
        heads.fit(replace(training, stages=stages), ROOT / "models", place, place, 1.0)

    fit(tmp_path / "whole")
    draw.drawn, draw.last = 0, STEPS + 1  # in the second stage
    with pytest.raises(CutError):
        fit(tmp_path / "cut")
    draw.last = None
    fit(tmp_path / "cut")
    assert draw.drawn == 2 * STEPS
    for name in ("config.json", "model.safetensors"):
        whole, cut = (tmp_path / place / kind / name for place in ("whole", "cut"))
        assert whole.read_bytes() == cut.read_bytes(), name

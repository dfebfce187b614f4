"""The start's check with published weights: each planted mistake is noticed, in every dtype."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.errors import StartupError
from tandem.inference.choice import candidates
from tests.support.models.planted import MISTAKES, Mistake

pytestmark = pytest.mark.campaign(
    "mistakes in the passes of a published model are noticed at the start",
    "unit/inference/check: random and embedded weights",
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mistake", [None, *MISTAKES])
@torch.inference_mode()
def test_the_start_notices_mistakes_alone(
    mistake: Mistake | None,
    dtype: torch.dtype,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).eval()
    if mistake is None:
        assert candidates.by_torch(copy.deepcopy(model)).takes_trees
        return
    mistake(monkeypatch)
    with pytest.raises(StartupError, match="differs from a plain pass") as refused:
        candidates.by_torch(model)
    record_property("refusal", str(refused.value))

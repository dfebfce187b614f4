"""Methods that draft by what the target tells, through real sockets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drafter_svc.settings import DrafterSettings
from target_svc.settings import TargetSettings
from tests.service.recipes.served_law import greedy_summaries
from tests.support.models.probes import extra_rows

METHODS: dict[str, tuple[dict[str, Any], int]] = {
    "jacobi": ({}, 0),
    "lookahead": (
        {"lookahead_window": 3, "lookahead_ngram": 3, "lookahead_candidates": 3},
        6,
    ),
    "masks": ({"masks": 2, "masks_top": 8}, 0),
    "phrases": ({"phrases_ngram": 2}, 6),
}


OTHERS = pytest.mark.campaign(
    "the law through sockets: certain tokens alone, and after drawn ones, by a drafter that is"
    " told predictions",
    "`lookahead` and `masks` (this file); each method enumerated (unit/drafting)",
)


@pytest.mark.parametrize(
    "method", [pytest.param(n, marks=OTHERS if n in ("jacobi", "phrases") else ()) for n in METHODS]
)
async def test_texts_follow_the_targets_law(
    method: str, random_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    keys, nodes = METHODS[method]
    small, large = random_pair
    rows = extra_rows(tmp_path, large, 3)
    found = await greedy_summaries(
        DrafterSettings(method=method, model=str(small), **keys),
        TargetSettings(model=str(large), extra_embeddings=rows),
        small,
        nodes,
        refused="greedy_block",
    )
    assert all(summary.feedback_bytes for summary in found)
    assert any(summary.accepted_tokens for summary in found)

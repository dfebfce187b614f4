"""The joint law of four tokens where the target drafts, through two processes and real sockets."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.drafting.methods import METHODS
from tests.exactness import (
    BRANCHING,
    PATIENT,
    SMALLEST_P,
    Case,
    count_texts,
    drafter_settings,
    rows_of,
    target_law,
    target_settings,
)
from tests.support.laws.laws import chi_square_p_value
from tests.support.models.tiny import save_random_llama
from tests.support.processes.services import trio

OTHERS = pytest.mark.campaign(
    "the law through sockets if the target drafts, with every method",
    "`tree` (this file); service/inside/test_placements.py: the same ids as with a drafter, of a"
    " method of each kind; runs of every method enumerated (unit/target/test_run_law.py)",
)

TEXTS, FEWER = 800, 400
# In `make test`: sizes of its drafts are left open, so that runs have drafts and plain rounds.
ONCE = [("tree", "support 2", None)]


@pytest.mark.parametrize(
    ("method", "rows", "gamma"),
    [
        *ONCE,
        *(
            pytest.param(name, rows, gamma, marks=OTHERS)
            for name in METHODS
            for rows in rows_of(name)
            for gamma in (3, None)
            if (name, rows, gamma) not in ONCE
        ),
    ],
)
def test_the_law_is_the_targets(
    method: str, rows: str, gamma: int | None, random_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = random_pair[0].parent
    save_random_llama(folder / "second", 3)
    settings = drafter_settings(method, rows, folder)
    target = target_settings(method, folder) | {"DRAFTS": settings.get("RECIPE", method)}
    nodes = 6 if method in BRANCHING and gamma else 0
    with trio(
        tmp_path, drafter=settings, target=target, orchestrator=PATIENT, inside=True
    ) as services:
        texts = FEWER if (method, rows, gamma) in ONCE else TEXTS
        counts = count_texts(services, Case("block", gamma, rows, nodes, method), range(texts))
    law = target_law(folder / "target")
    assert chi_square_p_value(counts, law) > SMALLEST_P

"""The joint law of four tokens through three processes and real sockets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tandem.drafting.methods import METHODS
from tests.exactness import (
    BRANCHING,
    PATIENT,
    RULES,
    SMALLEST_P,
    Case,
    count_texts,
    drafter_settings,
    rows_of,
    target_law,
)
from tests.support.laws.laws import chi_square_p_value
from tests.support.processes.services import trio

# The p-value of `mutant_target` is 2e-7 at as many.
TEXTS = 800
# In `make test`. Of rows of two tokens as many texts would not show that a rule stops too early.
# The rules for several chains decide a chain as these do, number by number
# (tests/unit/verification/test_tree_rules.py).
ONCE = ("model", "dense", ["block", "greedy_block"])


# Methods with branches are in test_trees.py; `make exactness` has all, and more of each.
@pytest.mark.parametrize(
    ("method", "rows", "rules"),
    [
        pytest.param(*ONCE, id="model-dense, block and greedy_block"),
        *(
            pytest.param(name, rows, RULES[name], marks=pytest.mark.campaign, id=f"{name}-{rows}")
            for name in METHODS
            if name not in BRANCHING
            for rows in rows_of(name)
        ),
    ],
)
def test_the_law_is_the_targets(
    method: str, rows: str, rules: Sequence[str], random_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    drafter, target = random_pair
    law, others = target_law(target), target_law(drafter)
    settings = drafter_settings(method, rows, drafter.parent)
    with trio(
        tmp_path, drafter=settings, target={"MODEL": str(target)}, orchestrator=PATIENT
    ) as services:
        for rule in rules:
            case = Case(rule, 3, rows, drafter=method)
            counts = count_texts(services, case, range(TEXTS))
            assert chi_square_p_value(counts, law) > SMALLEST_P, case
            assert chi_square_p_value(counts, others) < SMALLEST_P, "the drafter's law would pass"
        services.wait_idle()


@pytest.mark.campaign
@pytest.mark.parametrize("mutant", ["mutant_target", "mutant_kernel"])
def test_a_mutant_server_fails(mutant: str, random_pair: tuple[Path, Path], tmp_path: Path) -> None:
    drafter, target = random_pair
    with trio(
        tmp_path,
        drafter={"MODEL": str(drafter), "DRAFT_SUPPORT": "0"},
        target={"MODEL": str(target)},
        orchestrator=PATIENT,
        target_module=f"tests.system.serving.{mutant}",
    ) as services:
        counts = count_texts(services, Case("block", 3, "dense"), range(2 * TEXTS))
    assert chi_square_p_value(counts, target_law(target)) < SMALLEST_P

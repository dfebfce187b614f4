"""The joint law of four tokens through three processes and real sockets."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exactness import PATIENT, SMALLEST_P, SUPPORTS, Case, count_texts, target_law
from tests.support.laws.laws import chi_square_p_value
from tests.support.processes.services import trio

TEXTS = {"token": 1_500, "block": 5_000, "greedy_block": 1_500}


@pytest.mark.parametrize("rows", SUPPORTS)
def test_the_law_is_the_targets(rows: str, random_pair: tuple[Path, Path], tmp_path: Path) -> None:
    drafter, target = random_pair
    law = target_law(target)
    settings = {"MODEL": str(drafter), "DRAFT_SUPPORT": SUPPORTS[rows], "DRAFT_MASS": "1.0"}
    with trio(
        tmp_path, drafter=settings, target={"MODEL": str(target)}, orchestrator=PATIENT
    ) as services:
        for verifier, texts in TEXTS.items():
            counts = count_texts(services, Case(verifier, 3, rows), range(texts))
            assert chi_square_p_value(counts, law) > SMALLEST_P, verifier
        services.wait_idle()


def test_the_law_is_the_targets_with_drafts_from_the_text_itself(
    random_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """Certain tokens, drafts shorter than asked for, and rounds without any."""
    _, target = random_pair
    law = target_law(target)
    settings = {"METHOD": "lookup"}
    with trio(
        tmp_path, drafter=settings, target={"MODEL": str(target)}, orchestrator=PATIENT
    ) as services:
        for verifier in ("token", "block"):
            counts = count_texts(services, Case(verifier, 3, "lookup"), range(3_000))
            assert chi_square_p_value(counts, law) > SMALLEST_P, verifier
        services.wait_idle()


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
        counts = count_texts(services, Case("block", 3, "dense"), range(3_000))
    assert chi_square_p_value(counts, target_law(target)) < SMALLEST_P

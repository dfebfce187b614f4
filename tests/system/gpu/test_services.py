"""Services whose models a real GPU computes: the law, greedy texts, and texts of a seed."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.exactness import (
    BRANCHING,
    PATIENT,
    SMALLEST_P,
    Case,
    count_texts,
    drafter_settings,
    target_law,
    target_settings,
)
from tests.support.laws.laws import chi_square_p_value
from tests.support.models.greedy import VERIFIERS, references, source_lines, texts_of
from tests.support.processes.services import Trio, trio

pytestmark = pytest.mark.campaign(
    "passes, rounds, kernels and the law on a real GPU",
    "unit/inference/passes and batch, unit/kernels: the same code with fake devices, kernels "
    "interpreted",
)

TEXTS = 2000
ON_A_GPU = {"DEVICE": "cuda", "DTYPE": "float32"}
CASES = (
    ("model", "dense", ("block", "token", "greedy_block")),
    ("chains", "dense", ("spectr", "gbv")),
    ("tree", "support 2", ("block", "token")),
    ("eagle", "dense", ("block",)),
)


@contextmanager
def served(
    logs: Path, drafter: dict[str, str], target: dict[str, str], inside: bool
) -> Iterator[Trio]:
    """Real processes: a forked one may not use a device that its parent has used."""
    with trio(
        logs,
        drafter=ON_A_GPU | drafter,
        target=ON_A_GPU | target,
        orchestrator=PATIENT,
        inside=inside,
        start=subprocess.Popen,
    ) as services:
        yield services
    for log in logs.glob("*.log"):
        said = log.read_text()
        assert "one call a text" not in said
        assert "operator by operator" not in said


@pytest.mark.parametrize(("method", "rows", "rules"), CASES, ids=lambda value: str(value))
def test_the_law_is_the_targets(
    method: str, rows: str, rules: tuple[str, ...], gpu_pair: Path, tmp_path: Path
) -> None:
    law, others = target_law(gpu_pair / "target"), target_law(gpu_pair / "drafter")
    drafter = drafter_settings(method, rows, gpu_pair)
    nodes = 6 if method in BRANCHING else 0
    with served(tmp_path, drafter, target_settings(method, gpu_pair), False) as services:
        for rule in rules:
            case = Case(rule, 3, rows, nodes, method)
            counts = count_texts(services, case, range(TEXTS))
            assert chi_square_p_value(counts, law) > SMALLEST_P, case
            assert chi_square_p_value(counts, others) < SMALLEST_P, "the drafter's law would pass"
        services.wait_idle()


@pytest.mark.parametrize(("method", "gamma"), [("model", 3), ("tree", None), ("eagle", None)])
def test_the_law_is_the_targets_where_it_drafts(
    method: str, gamma: int | None, gpu_pair: Path, tmp_path: Path
) -> None:
    drafter = drafter_settings(method, "support 2", gpu_pair)
    target = target_settings(method, gpu_pair) | {"DRAFTS": method, "DRAFT_DEVICE": "cuda"}
    with served(tmp_path, drafter, target, True) as services:
        counts = count_texts(services, Case("block", gamma, "support 2", 0, method), range(TEXTS))
    assert chi_square_p_value(counts, target_law(gpu_pair / "target")) > SMALLEST_P


def test_greedy_texts_of_the_embedded_pair_are_those_of_transformers(tmp_path: Path) -> None:
    wanted = references(source_lines(16), 64)
    with served(tmp_path, {}, {}, False) as services:
        for verifier in VERIFIERS:
            for gamma in (0, 1, 4, 8):
                address = services.orchestrator.address
                texts = asyncio.run(texts_of(address, wanted, 64, verifier, gamma))
                for reference, text in zip(wanted, texts, strict=True):
                    assert reference.difference(text) is None, (verifier, gamma)

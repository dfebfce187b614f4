"""The source of the kernels for a GPU, run by Triton's interpreter on a CPU, in float32."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.unit.kernels.interpreted import CASES, HERE, MUTANTS

pytest.importorskip("triton")

Faults = dict[str, list[str]]


def found(what: str) -> Faults:
    """The faults of each one, by a process for all."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.kernels.interpreted", what],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    faults: Faults = json.loads(done.stdout)
    return faults


@pytest.fixture(scope="module")
def of_cases() -> Faults:
    return found("cases")


@pytest.fixture(scope="module")
def of_some() -> Faults:
    return found("some")


@pytest.fixture(scope="module")
def of_mutants() -> Faults:
    return found("mutants")


@pytest.mark.parametrize("case", CASES)
def test_a_kernel_computes_what_its_operator_says(of_cases: Faults, case: str) -> None:
    assert of_cases[case] == []


@pytest.mark.parametrize("mutant", HERE)
def test_a_mutant_of_each_case_is_caught(of_some: Faults, mutant: str) -> None:
    require_caught(of_some[mutant])


@pytest.mark.campaign(
    "the cases of kernels notice all mistakes that are tried in them",
    "one mistake for each case that has any (this file)",
)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_of_a_kernel_are_caught(of_mutants: Faults, mutant: str) -> None:
    require_caught(of_mutants[mutant])


def require_caught(faults: list[str]) -> None:
    """By the comparison of one case, and not by an error before it."""
    assert faults
    assert not any("Error" in fault for fault in faults)

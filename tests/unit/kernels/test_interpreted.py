"""The source of the kernels for a GPU, run by Triton's interpreter on a CPU, in float32."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.unit.kernels.interpreted import CASES, MUTANTS

pytest.importorskip("triton")

Faults = dict[str, list[str]]


@pytest.fixture(scope="module")
def found() -> dict[str, Faults]:
    """Faults of each case, and those that mutants' cases find; of one process for all."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.kernels.interpreted"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    faults: dict[str, Faults] = json.loads(done.stdout)
    return faults


@pytest.mark.parametrize("case", CASES)
def test_a_kernel_computes_what_its_operator_says(found: dict[str, Faults], case: str) -> None:
    assert found["cases"][case] == []


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_of_a_kernel_are_caught(found: dict[str, Faults], mutant: str) -> None:
    """By the comparison of one case, and not by an error before it."""
    faults = found["mutants"][mutant]
    assert faults
    assert not any("Error" in fault for fault in faults)

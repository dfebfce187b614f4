"""The benchmark of a GPU as people run it, on a CPU: all sections, with their processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.repository import ROOT

RUN_SECONDS = 1200  # on a busy machine
pytestmark = [
    pytest.mark.campaign(
        "`make bench-gpu` measures every row",
        "unit/benchmarks",
    ),
    pytest.mark.timeout(RUN_SECONDS),
]


def test_everything_runs_with_tiny_models(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--fake", "--minutes", "12"]
    run = subprocess.run(
        [*command, "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert (found["errors"], found["left_out"]) == ({}, [])
    for section in ("services", "three processes", "transformers", "law"):
        assert found["found"][section], section
    assert run.stdout.rstrip().endswith("all bars hold that were measured")

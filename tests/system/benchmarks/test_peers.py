"""The peers' benchmark as people run it, in its smallest size, with no extra packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.repository import ROOT

RUN_SECONDS = 1800  # on a busy machine
pytestmark = [
    pytest.mark.campaign(
        "`make bench-peers` measures every row",
        "unit/benchmarks",
    ),
    pytest.mark.timeout(RUN_SECONDS),
]

ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def test_a_quick_run_with_tandem_and_transformers(tmp_path: Path) -> None:
    out = tmp_path / "peers.json"
    command = [sys.executable, "-m", "benchmarks.peers", "--quick", "--texts", "20", "--turns", "1"]
    run = subprocess.run(
        [*command, "--engines", "tandem", "transformers", "--out", str(out)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=ONE_THREAD,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(out.read_text())
    assert not found["failures"]
    assert set(found["versions"]) == {"Tandem", "transformers"}
    assert {row["engine"] for row in found["measured"]} == {"Tandem", "transformers"}
    assert all(seconds > 0 for row in found["measured"] for seconds in row["seconds"])
    assert all(section["strongest"]["engine"] == "transformers" for section in found["summary"])
    assert set(found["laws"]) == {"Tandem", "transformers"}
    assert "x strongest exact peer" in out.with_suffix(".txt").read_text()

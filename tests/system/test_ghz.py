"""The real ghz runs both configurations of deploy/ghz by reflection, without an error."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import ROOT, Trio, trio

TIMEOUT_SECONDS = 120


@pytest.fixture(scope="module")
def ghz() -> str:
    folders = [os.environ.get("GOBIN", ""), str(ROOT / ".cache" / "bin"), os.environ["PATH"]]
    found = shutil.which("ghz", path=os.pathsep.join(filter(None, folders)))
    if found is None:
        pytest.skip(
            "no ghz on PATH, in GOBIN or in .cache/bin; it needs Go and two minutes: GOBIN="
            "$PWD/.cache/bin go install github.com/bojand/ghz/cmd/ghz@v0.121.0"
        )
    return found


@pytest.fixture(scope="module")
def stack(ghz: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    with trio(tmp_path_factory.mktemp("ghz")) as running:
        yield running


@pytest.mark.parametrize("name", ["complete", "generate"])
def test_no_call_fails(ghz: str, stack: Trio, name: str, tmp_path: Path) -> None:
    config = ROOT / "deploy" / "ghz" / f"{name}.json"
    report = tmp_path / "report.json"
    output = ["--format", "json", "--output", str(report)]
    command = [ghz, "--config", str(config), *output, stack.orchestrator.address]
    run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert run.returncode == 0, run.stderr
    # ghz exits with 0 even if every call fails.
    result = json.loads(report.read_text())
    total = json.loads(config.read_text())["total"]
    assert result["statusCodeDistribution"] == {"OK": total}
    assert result["count"] == total
    stack.wait_idle()

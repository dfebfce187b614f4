"""Every pinned package has a wheel for each supported Python: a fresh machine compiles nothing."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.repository import ROOT

pytestmark = pytest.mark.campaign(
    "a fresh machine compiles nothing",
    "nothing: it needs a package index",
)

UV = Path(sys.executable).parent / "uv"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSIONS = [
    name.rpartition(" ")[2]
    for name in PROJECT["classifiers"]
    if re.search(r"Python :: 3\.\d+$", name)
]
# What uv says where the index cannot be reached.
_AWAY = ("error sending request", "dns error", "Could not connect", "network")


@pytest.mark.parametrize("version", VERSIONS)
def test_every_pin_has_a_wheel(version: str, tmp_path: Path) -> None:
    command = [str(UV), "pip", "install", "--dry-run", "--require-hashes"]
    command += ["--only-binary", ":all:", "--python-version", version]
    command += ["--target", str(tmp_path), "--requirement", str(ROOT / "requirements.txt")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if result.returncode and any(words in result.stderr for words in _AWAY):
        pytest.skip("the package index cannot be reached")
    assert result.returncode == 0, result.stderr[-2000:]
    assert "Would install" in result.stderr or "Would make no changes" in result.stderr


def test_the_versions_are_those_that_make_takes() -> None:
    assert VERSIONS == ["3.11", "3.12", "3.13", "3.14"]
    assert PROJECT["requires-python"] == ">=3.11,<3.15"
    first, last = re.search(  # type: ignore[union-attr]
        r"not \(3, (\d+)\) <= sys.version_info\[:2\] <= \(3, (\d+)\)",
        (ROOT / "Makefile").read_text(),
    ).groups()
    assert (f"3.{first}", f"3.{last}") == (VERSIONS[0], VERSIONS[-1])

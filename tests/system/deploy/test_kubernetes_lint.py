"""Overlays against kube-linter."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.cluster.manifests import (
    KUBERNETES,
    VARIANTS,
    render_text,
    tool,
)
from tests.system.deploy.cluster import (
    BUILT_BY,
    folder,
)

pytestmark = pytest.mark.campaign(
    "kube-linter finds nothing in overlays",
    "unit/deploy: their manifests",
)

__all__ = ["folder"]  # a fixture of both files of overlays


@pytest.mark.skipif(
    None in (tool("kube-linter"), tool("kustomize")), reason=f"kube-linter {BUILT_BY}"
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_kube_linter_finds_nothing(variant: str, folder: Path) -> None:
    path = folder / "rendered.yaml"
    path.write_text(render_text(variant, folder))
    assert lint(path) == (0, "")
    # It does look: a root file system that can be written is found.
    path.write_text(path.read_text().replace("readOnlyRootFilesystem: true", ""))
    code, found = lint(path)
    assert code != 0
    assert "no-read-only-root-fs" in found


def lint(path: Path) -> tuple[int, str]:
    """kube-linter's exit status and what it says of a file."""
    program = tool("kube-linter")
    assert program is not None
    config = KUBERNETES / "kube-linter.yaml"
    command = [program, "lint", "--format=plain", "--config", str(config), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, "\n".join(line for line in done.stdout.splitlines() if "check:" in line)

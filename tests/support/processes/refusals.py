"""Services that cannot start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

from tests.support.repository import ROOT
from tests.support.waiting import HANG_SECONDS


def refusal(module: str, environment: Mapping[str, str]) -> str:
    """The line on standard error of a service that cannot start and exits with code 2."""
    result = subprocess.run(
        [sys.executable, "-m", module],
        env={**os.environ, "GRPC_VERBOSITY": "NONE", **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    own = f"{module.removesuffix('_svc')}: "  # its lines, among those of the log
    (line,) = [line for line in result.stderr.splitlines() if line.startswith(own)]
    return line

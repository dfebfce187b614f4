"""Services that cannot start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from tests.support.processes.fork_server import Forked
from tests.support.repository import ROOT
from tests.support.waiting import HANG_SECONDS


def refusal(module: str, environment: Mapping[str, str]) -> str:
    """The line on standard error of a service that cannot start and exits with code 2."""
    given = {**os.environ, "GRPC_VERBOSITY": "NONE", **environment}
    # The target's modules take ten seconds of CPU time to import, and the fork server has them.
    start: Any = Forked if module == "target_svc" else subprocess.Popen
    process = start(
        [sys.executable, "-m", module],
        env=given,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    with process.stdout as pipe:
        said: str = pipe.read().decode()
    assert process.wait(HANG_SECONDS) == 2, said
    assert "Traceback" not in said
    own = f"{module.removesuffix('_svc')}: "  # its lines, among those of the log
    (line,) = [line for line in said.splitlines() if line.startswith(own)]
    return line

"""Services that cannot start."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

from tests.support.processes.fork_server import Forked
from tests.support.waiting import HANG_SECONDS


def refusal(module: str, environment: Mapping[str, str]) -> str:
    """The line on standard error of a service that cannot start and exits with code 2."""
    given = {**os.environ, "GRPC_VERBOSITY": "NONE", **environment}
    process = Forked([module], env=given, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as pipe:
        said = pipe.read().decode()
    assert process.wait(HANG_SECONDS) == 2, said
    assert "Traceback" not in said
    own = f"{module.removesuffix('_svc')}: "  # its lines, among those of the log
    (line,) = [line for line in said.splitlines() if line.startswith(own)]
    return line

"""Processes beside the one that measures; none outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.measure.environment import ROOT

_POLL_SECONDS = 0.05
_LONGEST_TAIL = 1500


class Process:
    """A Python program of the project, with its log.

    Attributes:
        log: what it wrote.

    Args:
        role: names the log.
        command: the module and its arguments.
        folder: of the log.
        variables: of its environment, beside ours.
    """

    def __init__(
        self, role: str, command: Sequence[str], folder: Path, variables: Mapping[str, str]
    ) -> None:
        self.log = folder / f"{role}.log"
        # Wheels that were carried are found by PYTHONPATH, the project by the folder.
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *command],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=os.environ | dict(variables),
                start_new_session=True,
            )

    @property
    def code(self) -> int | None:
        """With which it ended; None while it runs."""
        return self._process.poll()

    @property
    def tail(self) -> str:
        """The end of its log."""
        return " ".join(self.log.read_text().split())[-_LONGEST_TAIL:]

    def wait(self, seconds: float, until: Callable[[], object] = lambda: False) -> bool:
        """Wait until something is so; False where it ended, or so many seconds passed, before."""
        deadline = time.perf_counter() + seconds
        while not until():
            if self.code is not None or time.perf_counter() > deadline:
                return bool(until())
            time.sleep(_POLL_SECONDS)
        return True

    def end(self) -> None:
        """Kill it, and what it started."""
        if self.code is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

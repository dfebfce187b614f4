"""A worker process, controlled by the benchmark."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.measure.environment import ROOT
from benchmarks.peers.protocol import Generate, Load, line_of

_QUIT_SECONDS = 30.0
_CLOSING_SECONDS = 1.0
_TOLD_LINES = 3


class EngineFailed(Exception):
    """An engine cannot do what was asked; the run goes on without it."""


class Worker:
    """A process that speaks the protocol, in its own process group.

    Args:
        command: to run.
        log: gets its standard error; overwritten.
        settings: variables of its environment, in addition to ours.
        pauses: whether to stop it between requests, so that it takes no core from others.
    """

    def __init__(
        self,
        command: list[str],
        log: Path,
        settings: Mapping[str, str] | None = None,
        *,
        pauses: bool = False,
    ) -> None:
        self._log, self._pauses = log, pauses
        # Another environment must not find our packages.
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env=env | dict(settings or {}),
                start_new_session=True,
            )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    @property
    def id(self) -> int:
        """The process id."""
        return self._process.pid

    def ask(self, ask: Load | Generate, timeout_s: float) -> dict[str, Any]:
        """Send a request and return the answer. A paused worker runs only for that time.

        Raises:
            EngineFailed: the answer is an error, or the worker ended or did not answer in time; in
                the last two cases it is killed.
        """
        self._signal(signal.SIGCONT)
        try:
            found = self._answer(line_of(ask), timeout_s)
        finally:
            if self._pauses:
                self._signal(signal.SIGSTOP)
        if error := found.get("error"):
            raise EngineFailed(error)
        return found

    def _answer(self, line: str, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
            answer = self._lines.get(timeout=timeout_s)
            if answer is not None:
                found: dict[str, Any] = json.loads(answer)
                return found
            reason = f"ended: {self._last_words()}"
        except queue.Empty:
            reason = f"no answer within {timeout_s:.0f} s"
        except (BrokenPipeError, json.JSONDecodeError) as error:
            reason = f"{type(error).__name__}: {self._last_words()}"
        self.kill()
        raise EngineFailed(reason)

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").split("\n")
        return " / ".join([line.strip() for line in lines if line.strip()][-_TOLD_LINES:])

    def quit(self) -> None:
        """End it by closing its input; kill it if that takes too long."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(_QUIT_SECONDS)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self.kill()
        self._close()

    def kill(self) -> None:
        """Kill it and its process group."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._close()

    def _close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        # A child of it may hold its output open; the thread then still reads it.
        self._reader.join(_CLOSING_SECONDS)
        if not self._reader.is_alive():
            self._process.stdout.close()

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

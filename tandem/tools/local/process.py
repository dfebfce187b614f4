"""A service in a process of its own, and what it says in its log."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import tandem
from tandem.tools.local import tethered

# Where the packages of the services are, wherever the command is called from.
ROOT = Path(tandem.__file__).resolve().parent.parent
# Huge pages for the weights (where the kernel leaves it to the process): a CPU reads all of them
# for a handful of rows, and a pass of 90 M parameters took 6 % less. One arena for all threads:
# those of the engine's own took 5 % of a draft step. Read when a process begins.
MEMORY = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1"}
_TAIL_LINES = 12
_READER_SECONDS = 2.0
_STOP_SECONDS = 30.0
_WILDCARDS = ("0.0.0.0", "[::]")


class ServiceProcess:
    """A running service.

    Its log is JSON lines; we wait for its "listening" line to learn the port it took. It has a
    session of its own, so that Ctrl-C reaches us alone and we choose the order of the stops; if
    we die without a word, the end of its standard input tells it (see `tethered.py`).

    Attributes:
        name: "drafter", "target" or "orchestrator".
        port: that it listens on; None until it does.

    Args:
        host: part of the address that it is told to listen on.
        module: to run.
        environment: over ours.
        log_file: gets every line at its end, if given.
        echo: is called with every line in a form for people, if given.
        root: of another checkout, whose packages then run, with its folder as their own.
        start: begins a process, as `subprocess.Popen` does.
    """

    def __init__(
        self,
        name: str,
        module: str,
        host: str,
        environment: Mapping[str, str],
        log_file: Path | None = None,
        echo: Callable[[str], None] | None = None,
        root: Path | None = None,
        start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
    ) -> None:
        self.name = name
        self.port: int | None = None
        self._host = "127.0.0.1" if host in _WILDCARDS else host
        self._log_file = log_file
        self._echo = echo
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        path = os.pathsep.join(filter(None, (str(root or ROOT), os.environ.get("PYTHONPATH"))))
        self._popen = start(
            # By its path, and -P keeps the folder that it lies in from hiding other modules.
            [sys.executable, "-P", tethered.__file__, module],
            env={**MEMORY, **os.environ, "PYTHONPATH": path, **environment},
            cwd=root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name=f"{name}-log", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        with ExitStack() as files:
            lines = files.enter_context(self._popen.stdout)
            log = files.enter_context(self._log_file.open("ab")) if self._log_file else None
            for raw in lines:
                if log is not None:
                    log.write(raw)
                    log.flush()
                self._take(raw.decode(errors="replace").rstrip())

    def _take(self, line: str) -> None:
        # Progress bars overwrite their line; the last state is the one that counts.
        line = line.rsplit("\r", 1)[-1]
        if not line:
            return
        entry = _entry(line)
        if entry.get("event") == "listening":
            self.port = int(entry["port"])
        readable = _readable(entry) if entry else line
        self._tail.append(readable)
        if self._echo is not None:
            self._echo(f"{self.name}: {readable}")

    @property
    def address(self) -> str:
        """Where we reach it, once it listens."""
        return f"{self._host}:{self.port}"

    @property
    def id(self) -> int:
        """As the system knows it."""
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative after a signal."""
        return self._popen.poll()

    def last_lines(self) -> tuple[str, ...]:
        """The end of its log; all of it has come if the process has ended."""
        if self.exit_code is not None:
            self._reader.join(_READER_SECONDS)
        return tuple(self._tail)

    def terminate(self) -> None:
        """Ask it to drain."""
        if self.exit_code is None:
            self._popen.terminate()

    def wait(self, seconds: float) -> int:
        """Its exit code, by force after a time."""
        try:
            self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            self._popen.kill()
        self._popen.wait()
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        self._reader.join(_READER_SECONDS)
        return self._popen.returncode

    def stop(self, seconds: float = _STOP_SECONDS) -> int:
        """Its exit code, once it has drained, or by force after a time."""
        self.terminate()
        return self.wait(seconds)

    def kill(self) -> None:
        """End it at once."""
        self.wait(0)

    def ending(self) -> str:
        """How it ended, in words."""
        code = self._popen.returncode
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"


def _entry(line: str) -> dict[str, Any]:
    if not line.startswith("{"):
        return {}
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}


def _readable(entry: Mapping[str, Any]) -> str:
    """A log entry as a line."""
    hidden = ("event", "level", "logger", "timestamp", "service")
    values = [f"{key}={value}" for key, value in entry.items() if key not in hidden]
    return " ".join((f"[{entry.get('level', 'info')}]", str(entry.get("event", "")), *values))

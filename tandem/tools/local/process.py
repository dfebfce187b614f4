"""A service in a process of its own, followed through its log."""

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

# The folder with the services' packages, wherever the command is called from.
ROOT = Path(tandem.__file__).resolve().parent.parent
# Huge pages for the weights, where the kernel lets a process choose: a CPU reads all weights for a
# handful of rows, and a pass of 90 M parameters took 6 % less. One malloc arena for all threads:
# separate ones cost the engine 5 % of a draft step. glibc reads this when a process starts.
MEMORY = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1"}
_TAIL_LINES = 12
_READER_SECONDS = 2.0
_STOP_SECONDS = 30.0
_WILDCARDS = ("0.0.0.0", "[::]")
# Lines of the log that tell a port, and the settings that ask for it.
_FURTHER = {"listening for HTTP": "HTTP_LISTEN", "metrics": "METRICS_LISTEN"}


class ServiceProcess:
    """A running service.

    Its log is JSON lines; its lines tell us the ports. It has a session of its own, so
    that only we get Ctrl-C and can choose the order of the stops. If we are killed, its standard
    input ends, and it stops (see `tethered.py`).

    Attributes:
        name: "drafter", "target" or "orchestrator".
        port: the port it listens on; None until it does.
        further_ports: by the setting that has them; there when `port` is.

    Args:
        host: the host part of the address to listen on.
        module: the module to run.
        environment: variables that override ours.
        log_file: every line is appended to it, if given.
        echo: is called with every line in readable form, if given.
        root: of another checkout, whose packages then run in that folder.
        start: starts a process, as `subprocess.Popen` does.
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
        self.further_ports: dict[str, int] = {}
        self._host = "127.0.0.1" if host in _WILDCARDS else host
        self._log_file = log_file
        self._echo = echo
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        path = os.pathsep.join(filter(None, (str(root or ROOT), os.environ.get("PYTHONPATH"))))
        self._popen = start(
            # Run by its path; -P keeps its folder off sys.path, where it could hide other modules.
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
        # Progress bars overwrite their line; only the last state counts.
        line = line.rsplit("\r", 1)[-1]
        if not line:
            return
        entry = _entry(line)
        event = entry.get("event")
        if event == "listening":
            if entry.get("admin_port"):
                self.further_ports["ADMIN_LISTEN"] = int(entry["admin_port"])
            self.port = int(entry["port"])
        elif event in _FURTHER:
            self.further_ports[_FURTHER[event]] = int(entry["port"])
        readable = _readable(entry) if entry else line
        self._tail.append(readable)
        if self._echo is not None:
            self._echo(f"{self.name}: {readable}")

    @property
    def address(self) -> str:
        """Where to connect, once it listens."""
        return f"{self._host}:{self.port}"

    @property
    def id(self) -> int:
        """The process id."""
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative after a signal."""
        return self._popen.poll()

    def last_lines(self) -> tuple[str, ...]:
        """The end of its log so far; if the process has ended, the end of all of it."""
        if self.exit_code is not None:
            self._reader.join(_READER_SECONDS)
        return tuple(self._tail)

    def terminate(self) -> None:
        """Ask it to drain."""
        if self.exit_code is None:
            self._popen.terminate()

    def wait(self, seconds: float) -> int:
        """Wait for its exit code; kill it after a time."""
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
        """Let it drain, and return its exit code; kill it after a time."""
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

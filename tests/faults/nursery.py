"""Services as processes that start within a second: forked off one that has imported torch.

It is told on standard input what to start, a JSON object a line, and says on standard output who
was born (its pid) and who has ended (its pid and exit code), likewise. It ends with its input, and
all of its children with it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from queue import Queue
from typing import Any

_POLL_SECONDS = 0.02
_END_SECONDS = 60.0
_IMPORTED = (
    "drafter_svc.servicer",
    "target_svc.servicer",
    "transformers.models.llama.modeling_llama",
)


class Nursery:
    """Starts services; use it as a context manager."""

    def __init__(self) -> None:
        self._born: Queue[int] = Queue()
        self._codes: dict[int, int] = {}
        self._popen = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        self._popen.wait(_END_SECONDS)
        self._reader.join(_END_SECONDS)

    def start(self, module: str, environment: Mapping[str, str], log: Path) -> int:
        """A service's pid. It may not listen yet."""
        assert self._popen.stdin is not None
        order = {"module": module, "environment": dict(environment), "log": str(log)}
        self._popen.stdin.write(json.dumps(order) + "\n")
        self._popen.stdin.flush()
        return self._born.get(timeout=120)

    def exit_code(self, pid: int) -> int | None:
        """Of one that has ended; negative after a signal."""
        return self._codes.get(pid)

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            news = json.loads(line)
            if "code" in news:
                self._codes[news["pid"]] = news["code"]
            else:
                self._born.put(news["pid"])


def _main() -> None:
    """The nursery's own process."""
    for module in _IMPORTED:
        importlib.import_module(module)
    children: set[int] = set()
    orders = b""
    while True:
        readable, _, _ = select.select([0], [], [], _POLL_SECONDS)
        if readable:
            if not (chunk := os.read(0, 1 << 16)):
                break
            *whole, orders = (orders + chunk).split(b"\n")
            for order in whole:
                children.add(_fork(json.loads(order)))
        for pid in tuple(children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                children.discard(pid)
                _say(pid=pid, code=os.waitstatus_to_exitcode(status))
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _fork(order: dict[str, Any]) -> int:
    if (pid := os.fork()) > 0:
        _say(pid=pid)
        return pid
    try:
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        null = os.open(os.devnull, os.O_RDONLY)
        for descriptor, source in ((0, null), (1, log), (2, log)):
            os.dup2(source, descriptor)
        os.environ.update(order["environment"])
        sys.argv = [order["module"]]
        runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
    finally:
        os._exit(1)  # a service ends by itself


def _say(**news: int) -> None:
    os.write(1, json.dumps(news).encode() + b"\n")


if __name__ == "__main__":
    _main()

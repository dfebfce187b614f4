"""Services that start within a second: forked from a process that has already imported torch.

An order is a JSON object, sent with the descriptors for standard input and output. The answer is
the new child's pid and, when a child ends, its pid and exit code. The server ends with its socket,
and kills all of its children.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from queue import Queue
from typing import IO, Any

from tandem.inference.threads import spin_less
from tandem.tools.local import tethered
from tandem.tools.local.process import MEMORY, ROOT
from tests.support.processes.measuring import measure_once

_POLL_SECONDS = 0.02
_BORN_SECONDS = 120.0
_END_SECONDS = 60.0
_IMPORTED = (
    "drafter_svc.servicer",
    "target_svc.servicer",
    "orchestrator.front.service",
    "transformers.models.llama.modeling_llama",
)
# Most bytes of an order; more than an environment needs.
_ORDER_BYTES = 1 << 17


class Forked:
    """A service's process, with the interface of `subprocess.Popen`.

    Attributes:
        pid: its id.
        stdin: our end of the pipe, if there is one.
        stdout: our end of the pipe, if there is one.
        returncode: None until it is known to have ended; negative after a signal.

    Args:
        arguments: a command line that ends with the module to run.
        env: its environment.
        stdin: PIPE, to tether the service to it, or None.
        stdout: PIPE or a descriptor; used for its standard error too.
        rest: ignored: it has its own session anyway, and runs in the repository's folder.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        stdin: int | None = None,
        stdout: int | None = None,
        **rest: object,
    ) -> None:
        self._server = fork_server()
        self.returncode: int | None = None
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        given: list[int] = []
        if stdin == subprocess.PIPE:
            read, write = os.pipe()
            given.append(read)
            self.stdin = os.fdopen(write, "wb", 0)
        else:
            given.append(os.open(os.devnull, os.O_RDONLY))
        if stdout == subprocess.PIPE:
            read, write = os.pipe()
            given.append(write)
            self.stdout = os.fdopen(read, "rb")
        else:
            assert stdout is not None
            given.append(os.dup(stdout))
        try:
            order = {"module": arguments[-1], "environment": dict(env), "tethered": bool(stdin)}
            self.pid = self._server.start(order, given)
        finally:
            for descriptor in given:
                os.close(descriptor)

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""
        self.returncode = self._server.exit_code(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended."""
        code = self._server.wait(self.pid, timeout)
        if code is None:
            raise subprocess.TimeoutExpired("a forked service", timeout or 0.0)
        self.returncode = code
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, if it is running."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """Starts services by forking."""

    def __init__(self) -> None:
        self._orders = threading.Lock()
        self._born: Queue[int] = Queue()
        self._codes: dict[int, int] = {}
        self._ended = threading.Condition()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                env={**os.environ, **MEMORY},
                cwd=ROOT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        threading.Thread(target=self._read, name="fork-server", daemon=True).start()

    def start(self, order: Mapping[str, Any], given: Sequence[int]) -> int:
        """Start a service and return its pid. It may not listen yet.

        Args:
            order: the module to run, its whole environment, and whether it ends with its input.
            given: descriptors for its standard input and output.
        """
        message = json.dumps(order).encode()
        assert len(message) < _ORDER_BYTES
        with self._orders:
            socket.send_fds(self._socket, [message], given)
            return self._born.get(timeout=_BORN_SECONDS)

    def exit_code(self, pid: int) -> int | None:
        """Exit code of an ended child, negative after a signal; None while it runs."""
        return self._codes.get(pid)

    def wait(self, pid: int, seconds: float | None) -> int | None:
        """Wait for the exit code of a child; None if it takes longer."""
        with self._ended:
            self._ended.wait_for(lambda: pid in self._codes, seconds)
        return self._codes.get(pid)

    def _read(self) -> None:
        while news := self._socket.recv(_ORDER_BYTES):
            said = json.loads(news)
            if "code" not in said:
                self._codes.pop(said["pid"], None)  # pids may be reused
                self._born.put(said["pid"])
                continue
            with self._ended:
                self._codes[said["pid"]] = said["code"]
                self._ended.notify_all()

    def close(self) -> None:
        """End the server and its children."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        self._popen.wait(_END_SECONDS)


@cache
def fork_server() -> ForkServer:
    """The fork server of this process."""
    found = ForkServer()
    atexit.register(found.close)
    return found


def _main(number: int) -> None:
    """Run the fork server, and in its children the service."""
    spin_less()  # before torch is imported
    gc.disable()
    for module in _IMPORTED:
        importlib.import_module(module)
    measure_once()
    # A garbage collection in a child would touch all of torch's objects, and copy their pages.
    gc.freeze()
    gc.enable()
    with socket.socket(fileno=number) as line:
        order = _tend(line)
    if order is None:
        return
    sys.argv = [tethered.__file__, order["module"]]
    if order["tethered"]:
        tethered.main()
    else:
        runpy.run_module(order["module"], run_name="__main__", alter_sys=True)


def _tend(line: socket.socket) -> dict[str, Any] | None:
    """Start children and report their ends. Returns in each child with its order, and in the parent
    with None at the end."""
    children: set[int] = set()
    while True:
        readable, _, _ = select.select([line], [], [], _POLL_SECONDS)
        if readable:
            said, given, _, _ = socket.recv_fds(line, _ORDER_BYTES, 2)
            if not said:
                break
            if (pid := os.fork()) == 0:
                order: dict[str, Any] = json.loads(said)
                _become(order, given)
                return order
            for descriptor in given:
                os.close(descriptor)
            children.add(pid)
            _say(line, pid=pid)
        for pid in tuple(children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                children.discard(pid)
                _say(line, pid=pid, code=os.waitstatus_to_exitcode(status))
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return None


def _become(order: Mapping[str, Any], given: Sequence[int]) -> None:
    """Set up a child: its session, its standard streams and its environment."""
    os.setsid()
    for descriptor, source in ((0, given[0]), (1, given[1]), (2, given[1])):
        os.dup2(source, descriptor)
    for descriptor in given:
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(order["environment"])


def _say(line: socket.socket, **news: int) -> None:
    line.send(json.dumps(news).encode())


if __name__ == "__main__":
    _main(int(sys.argv[1]))

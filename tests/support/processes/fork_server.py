"""Services that start within a second: forked from a process that has already imported torch.

All processes of a run of pytest share one server, which the first of them starts. An order is a
JSON object, sent with the descriptors for standard input and output. The answer is the new child's
pid and, when a child ends, its pid, exit code and CPU seconds. With a connection its children are
killed, and the server ends with the last one.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
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
import time
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
# Processes of a run of pytest that may wait to be accepted.
_MOST_LINES = 64
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
    """Starts services by forking.

    Attributes:
        cpu_seconds: of our children that have ended.
    """

    def __init__(self) -> None:
        self._orders = threading.Lock()
        self._born: Queue[int] = Queue()
        self._codes: dict[int, int] = {}
        self.cpu_seconds = 0.0
        self._ended = threading.Condition()
        self._popen: subprocess.Popen[bytes] | None = None
        # An abstract name, which is gone with its socket. xdist's processes have one run's id.
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID", f"process-{os.getpid()}")
        name = f"\0tandem-fork-server-{run}"
        while (line := _connected(name)) is None:
            self._launch(name)
        self._socket = line
        self._reader = threading.Thread(target=self._read, name="fork-server", daemon=True)
        self._reader.start()

    def _launch(self, name: str) -> None:
        """Start the server, unless another process does."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            try:
                listening.bind(name)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                time.sleep(_POLL_SECONDS)  # until it listens
                return
            listening.listen(_MOST_LINES)
            self._popen = subprocess.Popen(
                [sys.executable, "-m", __name__, str(listening.fileno())],
                env={**MEMORY, **os.environ},
                cwd=ROOT,
                pass_fds=(listening.fileno(),),
                start_new_session=True,
            )

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
                self.cpu_seconds += said["cpu_seconds"]
                self._ended.notify_all()

    def close(self) -> None:
        """End our children, and the server if nobody else is connected to it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        self._reader.join(_END_SECONDS)
        if self._popen is not None:
            self._popen.poll()
            self._popen.returncode = 0  # others may go on using it: nobody waits for its end


def _connected(name: str) -> socket.socket | None:
    """A connection to the server of a name; None if there is none."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        line.connect(name)
    except ConnectionRefusedError:
        line.close()
        return None
    return line


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
    with socket.socket(fileno=number) as listening:
        order = _tend(listening)
    if order is None:
        return
    sys.argv = [tethered.__file__, order["module"]]
    if order["tethered"]:
        tethered.main()
    else:
        runpy.run_module(order["module"], run_name="__main__", alter_sys=True)


def _tend(listening: socket.socket) -> dict[str, Any] | None:
    """Start children and report their ends. Returns in each child with its order, and in the parent
    with None at the end."""
    lines: dict[socket.socket, set[int]] = {}  # with the children of each
    while True:
        readable, _, _ = select.select([listening, *lines], [], [], _POLL_SECONDS)
        for line in readable:
            if line is listening:
                lines[listening.accept()[0]] = set()
                continue
            said, given, _, _ = socket.recv_fds(line, _ORDER_BYTES, 2)
            if not said:
                _hang_up(line, lines.pop(line))
                continue
            if (pid := os.fork()) == 0:
                for other in lines:
                    other.close()
                order: dict[str, Any] = json.loads(said)
                _become(order, given)
                return order
            for descriptor in given:
                os.close(descriptor)
            lines[line].add(pid)
            _say(line, pid=pid)
        if readable and not lines and not select.select([listening], [], [], 0)[0]:
            return None
        for line, children in lines.items():
            for pid in tuple(children):
                ended, status, used = os.wait4(pid, os.WNOHANG)
                if ended:
                    children.discard(pid)
                    code = os.waitstatus_to_exitcode(status)
                    _say(line, pid=pid, code=code, cpu_seconds=used.ru_utime + used.ru_stime)


def _hang_up(line: socket.socket, children: set[int]) -> None:
    """Kill the children of a connection, and close it."""
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    line.close()


def _become(order: Mapping[str, Any], given: Sequence[int]) -> None:
    """Set up a child: its session, its standard streams and its environment."""
    os.setsid()
    for descriptor, source in ((0, given[0]), (1, given[1]), (2, given[1])):
        os.dup2(source, descriptor)
    for descriptor in given:
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(order["environment"])
    # As a process that begins would read it.
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))


def _say(line: socket.socket, **news: float) -> None:
    with contextlib.suppress(OSError):  # it has just been closed
        line.send(json.dumps(news).encode())


if __name__ == "__main__":
    _main(int(sys.argv[1]))

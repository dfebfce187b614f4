"""The ranks of a model beside the first: processes of this machine, one for each device."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

import structlog

from tandem.inference.vllm.rank import RankPlan, written

_log = structlog.get_logger(__name__)


class OtherRanks:
    """Starts the other ranks, and watches them.

    A pass needs all ranks: a rank that ends leaves the others waiting in the middle of one.

    Args:
        plan: of rank 0.
        lost: is called in a thread when a rank has ended by itself.
    """

    def __init__(self, plan: RankPlan, lost: Callable[[str], None]) -> None:
        self._lost, self._closing = lost, False
        self._processes: list[subprocess.Popen[bytes]] = []
        for number in range(1, plan.arguments["tensor_parallel_size"]):
            command = [sys.executable, "-m", "tandem.inference.vllm.rank"]
            process = subprocess.Popen(command, stdin=subprocess.PIPE)
            self._processes.append(process)
            assert process.stdin is not None
            process.stdin.write(written(replace(plan, rank=number, local_rank=number)).encode())
            process.stdin.write(b"\n")
            process.stdin.flush()
            threading.Thread(target=self._watch, args=(number, process), daemon=True).start()

    def close(self) -> None:
        """End them."""
        self._closing = True
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            process.wait()

    def _watch(self, number: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._closing:
            self._lost(f"rank {number} ended with exit code {code}")


def end_process(sentence: str) -> None:
    """End this process, whose pass would never end: texts go on elsewhere."""
    _log.critical("a model without all of its ranks computes nothing", reason=sentence)
    os._exit(1)


def free_address() -> str:
    """A free port of this machine, as HOST:PORT."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{found.getsockname()[1]}"

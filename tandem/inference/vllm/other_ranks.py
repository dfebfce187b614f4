"""Ranks of a model in processes of their own, one for each device of this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog

from tandem.inference.vllm.rank import RankPlan, written

_log = structlog.get_logger(__name__)


class OtherRanks:
    """Starts ranks, and watches them.

    A pass needs all ranks: where one ends, the others would wait for it for ever.

    Args:
        plan: of rank 0.
        numbers: of the ranks.
        first: number of this machine's first rank.
        lost: is called in a thread when a rank has ended by itself.
    """

    def __init__(
        self, plan: RankPlan, numbers: Sequence[int], first: int, lost: Callable[[str], None]
    ) -> None:
        self._lost, self._closing = lost, False
        self._processes: list[subprocess.Popen[bytes]] = []
        for number in numbers:
            command = [sys.executable, "-m", "tandem.inference.vllm.rank"]
            process = subprocess.Popen(command, stdin=subprocess.PIPE)
            self._processes.append(process)
            assert process.stdin is not None
            own = replace(plan, rank=number, local_rank=number - first)
            process.stdin.write(written(own).encode() + b"\n")
            process.stdin.flush()
            threading.Thread(target=self._watch, args=(number, process), daemon=True).start()

    def wait(self) -> None:
        """Until rank 0 has ended them."""
        for process in self._processes:
            process.wait()

    def close(self) -> None:
        """End them."""
        self._closing = True
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        self.wait()

    def _watch(self, number: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if code and not self._closing:
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

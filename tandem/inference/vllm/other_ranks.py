"""Ranks of a model in processes of their own, one for each device of this machine."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from tandem.inference.vllm.rank import RankPlan, written

# That a rank may take to end in order.
_END_SECONDS = 15.0


class OtherRanks:
    """Starts ranks, and watches them.

    A pass needs all ranks: where one ends, the others would wait for it for ever.

    Args:
        plan: of rank 0.
        numbers: of the ranks.
        first: number of this machine's first rank.
        lost: is called in a thread when a rank has ended by itself, with why and its exit code.
    """

    def __init__(
        self, plan: RankPlan, numbers: Sequence[int], first: int, lost: Callable[[str, int], None]
    ) -> None:
        self._lost, self._closing = lost, False
        self._processes: list[subprocess.Popen[bytes]] = []
        for number in numbers:
            command = [sys.executable, "-m", "tandem.inference.vllm.rank"]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
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

    def left(self) -> bool:
        """Whether some go on where rank 0 is gone, though they had time to end in order."""
        until = time.monotonic() + _END_SECONDS
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(until - time.monotonic(), 0))
        return any(process.poll() is None for process in self._processes)

    def close(self, *, told: bool = False) -> None:
        """End them.

        Args:
            told: rank 0 has told them to; else they end at once.
        """
        self._closing = True
        for process in self._processes:
            if told:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_END_SECONDS)
            assert process.stdin is not None
            process.stdin.close()
        self.wait()

    def _watch(self, number: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if code and not self._closing:
            self._lost(f"rank {number} ended with exit code {code}", 2 if code == 2 else 1)


def free_address() -> str:
    """A free port of this machine, as HOST:PORT."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{found.getsockname()[1]}"

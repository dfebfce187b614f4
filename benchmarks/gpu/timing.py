"""Wall times of work on a device, and of the host's part of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

_WARM_UPS, _LEAST, _MOST = 2, 3, 30


class Deadline:
    """A moment of `time.perf_counter`.

    Args:
        seconds: from now.
    """

    def __init__(self, seconds: float) -> None:
        self.at = time.perf_counter() + seconds

    @property
    def left(self) -> float:
        """Seconds until then; negative afterwards."""
        return self.at - time.perf_counter()

    @property
    def over(self) -> bool:
        """Whether it has passed."""
        return self.left <= 0


class Stopwatch:
    """Measures work of one device.

    Args:
        device: that computes.
        turn: seconds for which work is repeated.
    """

    def __init__(self, device: torch.device, turn: float) -> None:
        self._device = device
        self._turn = turn

    def wait(self) -> None:
        """Until the device has done all that was launched."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def times(
        self,
        work: Callable[[], object],
        restore: Callable[[], object] = lambda: None,
        *,
        least: int = _LEAST,
        most: int = _MOST,
        warm_ups: int = _WARM_UPS,
    ) -> tuple[float, float]:
        """Median ms of work with its end on the device, and of the host alone, that launches it.

        Args:
            work: launches, and need not wait.
            restore: is called after each; not timed.
            least: repetitions, however long they take.
            most: repetitions.
            warm_ups: repetitions before, which are not counted.
        """
        walls, hosts = [], []
        until = Deadline(self._turn)
        for turn in range(warm_ups + most):
            self.wait()
            began = time.perf_counter()
            work()
            launched = time.perf_counter()
            self.wait()
            ended = time.perf_counter()
            restore()
            if turn >= warm_ups:
                walls.append(1e3 * (ended - began))
                hosts.append(1e3 * (launched - began))
            if len(walls) >= least and until.over:
                break
        return median(walls), median(hosts)

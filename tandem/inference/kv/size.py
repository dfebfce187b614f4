"""How many positions of a KV cache fit."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from tandem.errors import StartupError

# Of the free memory, for the KV pool.
_MOST_OF_MEMORY = 0.8
_CGROUP = Path("/sys/fs/cgroup")


def cache_size(device: torch.device, bytes_each: int, wanted: int, at_most: int) -> int:
    """Positions of the KV pool.

    Args:
        device: where it goes.
        bytes_each: of a position.
        wanted: positions asked for; 0 for `at_most`, or what fits into half the free memory.
        at_most: see there.

    Raises:
        StartupError: the device cannot hold what was asked for; with the numbers.
    """
    free = free_memory(device)
    # The rest is for logits and distributions, and for whoever else is on the machine.
    positions = wanted or min(at_most, free // 2 // bytes_each)
    if positions * bytes_each > free * _MOST_OF_MEMORY:
        raise StartupError(
            f"a KV cache of {positions} tokens takes {positions * bytes_each / 2**30:.1f} GiB,"
            f" {device} has {free / 2**30:.1f} GiB free; lower CACHE_TOKENS"
        )
    return positions


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated now."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what torch keeps of the start's copies is free as well
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_free_in_machine(), _free_in_container())


def _free_in_machine() -> int:
    """Memory available without swapping, which no API of Python's standard library tells."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            entries = dict(line.split(":", 1) for line in lines)
        return int(entries["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_in_container() -> int:
    """What the control group leaves; beyond it the process is killed."""
    limit, used = (_CGROUP / name for name in ("memory.max", "memory.current"))
    try:
        return int(limit.read_text()) - int(used.read_text())
    except (OSError, ValueError):  # no group of its own, or "max"
        return sys.maxsize

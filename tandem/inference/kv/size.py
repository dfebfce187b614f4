"""How many positions of a KV cache fit."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from tandem.errors import StartupError

# Largest share of the free memory for the KV pool.
_MOST_OF_MEMORY = 0.8
_CGROUP = Path("/sys/fs/cgroup")


def cache_size(device: torch.device, bytes_each: int, wanted: int, at_most: int) -> int:
    """Positions of the KV pool.

    Args:
        device: that holds the pool.
        bytes_each: of a position.
        wanted: positions asked for; 0 takes the smaller of `at_most` and what fits into half the
            free memory.
        at_most: see `wanted`.

    Raises:
        StartupError: the device cannot hold that many; with the numbers.
    """
    free = free_memory(device)
    # The other half is for logits and distributions, and for other programs on the machine.
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
        torch.cuda.empty_cache()  # blocks that torch has cached since the start are free too
        # And so are parts of blocks that it cannot return.
        parts = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + parts
    return min(_free_in_machine(), _free_in_container())


def _free_in_machine() -> int:
    """Memory available without swapping, for which Python's standard library has no API."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            entries = dict(line.split(":", 1) for line in lines)
        return int(entries["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_in_container() -> int:
    """Memory left in the control group; beyond it the process is killed."""
    limit, used = (_CGROUP / name for name in ("memory.max", "memory.current"))
    try:
        return int(limit.read_text()) - int(used.read_text())
    except (OSError, ValueError):  # no control group, or no limit ("max")
        return sys.maxsize

"""How many positions of a KV cache fit."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from tandem.errors import StartupError, first_line

# Largest share of a CPU's free memory for the KV pool, and the share that it takes by itself: the
# rest is for logits and distributions, and for other programs on the machine.
_MOST_OF_MEMORY, _OF_MEMORY = 0.8, 0.5
# Bytes of a device beside weights, pool and passes: the CUDA context (up to half of this),
# libraries' workspaces, and kernels that are compiled later.
RESERVED = 1 << 30
_CGROUP = Path("/sys/fs/cgroup")


class Room(NamedTuple):
    """How much a KV pool may have.

    Attributes:
        cache_tokens: positions, as the setting says; 0 takes what fits, and at most `at_most`.
        at_most: see `cache_tokens`.
        share: of the device's memory, for all that this process has there.
        passes: bytes of a device beside weights and pool, for its largest pass; not of a CPU.
        kept: positions of a device that are left for pools of other keys of the model.
        weights: bytes of a device that are left for later weights.
        pools: KV caches of this size that there is to be room for; where `cache_tokens` says the
            size, two of them on a device.
    """

    cache_tokens: int
    at_most: int
    share: float = 1.0
    passes: int = 0
    kept: int = 0
    weights: int = 0
    pools: int = 1


def cache_size(device: torch.device, bytes_each: int, room: Room) -> int:
    """Positions of the KV pool.

    Args:
        device: that holds the pool.
        bytes_each: of a position.
        room: what it may have. By itself it takes all that a device has beside weights and passes,
            and half of a CPU's free memory, which other programs need too.

    Raises:
        StartupError: the device cannot hold that many, or none; with the numbers.
    """
    free = free_memory(device)
    most, own = int(free * _MOST_OF_MEMORY), int(free * _OF_MEMORY * room.share) // room.pools
    has = f"{device} has {gib(free)} free"
    if device.type == "cuda":
        kept = room.passes + room.weights + room.kept * bytes_each
        most = max(memory_left(device, room.share) - kept - RESERVED, 0)
        own = most // room.pools
        later = f", later weights of {gib(room.weights)}" if room.weights else ""
        has += f", {gib(most)} of it beside its passes{later} and within MEMORY_SHARE"
    positions = room.cache_tokens or min(room.at_most, own // bytes_each)
    if not positions:
        more = "lower TOKEN_BUDGET" if room.share == 1 else "raise MEMORY_SHARE"
        more += " or set ONLINE=0" if room.pools > 1 else ""
        raise StartupError(f"there is no memory for a KV cache: {has}; {more}")
    takes = positions * bytes_each
    if takes > most:
        raise StartupError(
            f"a KV cache of {positions} tokens takes {gib(takes)}, {has}; lower CACHE_TOKENS"
        )
    if room.weights and 2 * takes > most:
        raise StartupError(
            f"ONLINE: a KV cache of {positions} tokens and one for later weights take"
            f" {gib(2 * takes)}, {has}; lower CACHE_TOKENS, raise MEMORY_SHARE or set ONLINE=0"
        )
    return positions


def gib(size: int) -> str:
    """Bytes in a sentence."""
    return f"{size / 2**30:.1f} GiB"


@contextmanager
def told_without_room() -> Iterator[None]:
    """Tell a device's lack of memory as Python tells that of a CPU.

    Raises:
        MemoryError: in place of torch's own error, which is none.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryError(first_line(error)) from error


def memory_left(device: torch.device, share: float) -> int:
    """Bytes of a CUDA device that this process may still take: of its share, if they are free."""
    free = free_memory(device)
    if share == 1:
        return free
    held, total = memory_held(device)
    return min(free, int(total * share) - held)


def device_memory(name: str) -> int | None:
    """Bytes of a CUDA device, by its name in the settings; None of any other."""
    device = torch.device(name)
    return int(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else None


def memory_held(device: torch.device) -> tuple[int, int]:
    """Bytes of a CUDA device that this process has allocated, and all that it has."""
    return torch.cuda.memory_reserved(device), int(torch.cuda.mem_get_info(device)[1])


def memory_during(device: torch.device, run: Callable[[], object]) -> int:
    """Bytes that `run` allocates on a CUDA device, at its most, beside those held before it."""
    torch.cuda.empty_cache()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_reserved(device) - before


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated now."""
    if device.type == "cuda":
        # Blocks that torch has cached since the start are free too. What is left of others is in
        # pieces, or of captured passes.
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
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
        return int(limit.read_text()) - int(used.read_text()) + _given_up_first()
    except (OSError, ValueError):  # no control group, or no limit ("max")
        return sys.maxsize


def _given_up_first() -> int:
    """Bytes of the control group's files that were read and are not in use, such as a checkpoint's:
    they count as used, and are given up before memory runs out."""
    try:
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
        return int(dict(line.split() for line in lines)["inactive_file"])
    except (OSError, KeyError, ValueError):
        return 0

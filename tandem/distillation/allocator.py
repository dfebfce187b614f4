"""An allocator that keeps the memory that a step of training frees."""

from __future__ import annotations

import os
import sys

# Each step allocates and frees the same memory. glibc gives large blocks back to the kernel each
# time, and page faults then take up to half of the time. It reads these only at a process' start.
SETTINGS = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_TOP_PAD_": str(1 << 28),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


def keep_freed_memory() -> None:
    """Start this process again with these settings, unless it has them; its own values stay."""
    if sys.platform == "linux" and not SETTINGS.keys() <= os.environ.keys():
        os.execve(sys.executable, sys.orig_argv, {**SETTINGS, **os.environ})

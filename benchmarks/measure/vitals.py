"""A process's vitals from /proc: memory, descriptors, threads, CPU time."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Vitals:
    """A process at one moment.

    Attributes:
        anonymous_bytes: resident memory that no file backs: heaps, stacks, tensors.
        resident_bytes: all resident memory.
        descriptors: number of open descriptors.
        threads: number of threads.
    """

    anonymous_bytes: int
    resident_bytes: int
    descriptors: int
    threads: int


def vitals_of(process: int) -> Vitals:
    """The vitals of a process, by its id.

    Raises:
        FileNotFoundError: the process has ended.
    """
    folder = Path("/proc") / str(process)
    lines = (folder / "status").read_text().splitlines()
    said = dict(line.split(":", 1) for line in lines)
    return Vitals(
        int(said["RssAnon"].split()[0]) * 1024,
        int(said["VmRSS"].split()[0]) * 1024,
        len(os.listdir(folder / "fd")),
        int(said["Threads"]),
    )


def cpu_seconds(process: int) -> float:
    """User and system time of a process and all its threads.

    Raises:
        FileNotFoundError: the process has ended.
    """
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND

"""What the kernel says of a process: memory, descriptors, threads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Vitals:
    """A process at one moment.

    Attributes:
        anonymous_bytes: resident memory that no file backs: heaps, stacks, tensors.
        descriptors: open ones.
        threads: as many.
    """

    anonymous_bytes: int
    descriptors: int
    threads: int


def vitals_of(process: int) -> Vitals:
    """Those of a process, by its id.

    Raises:
        FileNotFoundError: it has ended.
    """
    folder = Path("/proc") / str(process)
    lines = (folder / "status").read_text().splitlines()
    said = dict(line.split(":", 1) for line in lines)
    return Vitals(
        int(said["RssAnon"].split()[0]) * 1024,
        len(os.listdir(folder / "fd")),
        int(said["Threads"]),
    )

"""The two consoles of the command: what it is asked for, and what it says beside it."""

from __future__ import annotations

import sys

from rich.console import Console

# Wide enough for every table of ours where nobody's terminal sets the limit.
_PIPE_WIDTH = 120

out = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
err = Console(highlight=False, stderr=True)


def write_exactly(text: str) -> None:
    """Write to standard output at once, character by character: rich would expand tabs."""
    out.file.write(text)
    out.file.flush()


def tell(event: object) -> None:
    """A line beside what was asked for: what has just been done."""
    err.out(str(event), style="dim", highlight=False)

"""The command's two consoles: standard output for results, standard error for remarks."""

from __future__ import annotations

import sys

from rich.console import Console

# Without a terminal: wide enough for all of our tables.
_PIPE_WIDTH = 120

out = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
err = Console(highlight=False, stderr=True)


def write_exactly(text: str) -> None:
    """Write to standard output at once, character by character: rich would expand tabs."""
    out.file.write(text)
    out.file.flush()


def tell(event: object) -> None:
    """Print a line on standard error: what has just been done."""
    err.out(str(event), style="dim", highlight=False)

"""How a failed command ends: one line on standard error, and an exit code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from tandem.failure import Failure, Misconfigured
from tandem.tools.cli.display.terminal import err

FAILED = 1
MISCONFIGURED = 2
INTERRUPTED = 130


@contextmanager
def so_far(interrupted: bool) -> Iterator[None]:
    """Report a load. An interrupted load ends as interrupted, whatever its figures say.

    Raises:
        KeyboardInterrupt: the load was interrupted.
    """
    try:
        yield
    except Failure as failure:
        if not interrupted:
            raise
        err.out(f"tandem: {failure}", style="red", highlight=False)
    if interrupted:
        raise KeyboardInterrupt


@contextmanager
def reported() -> Iterator[None]:
    """Turn a failure into its line and exit code; Ctrl-C into exit code 130."""
    try:
        yield
    except Failure as failure:
        for line in failure.details:
            err.out(f"  {line}", style="dim", highlight=False)
        err.out(f"tandem: {failure}", style="red", highlight=False)
        code = MISCONFIGURED if isinstance(failure, Misconfigured) else FAILED
        raise typer.Exit(code) from None
    except KeyboardInterrupt:
        err.out("tandem: interrupted", style="dim", highlight=False)
        raise typer.Exit(INTERRUPTED) from None

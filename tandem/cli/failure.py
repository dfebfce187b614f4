"""How a command fails: one line on standard error, and an exit code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from tandem.cli.terminal import err

INTERRUPTED = 130


class Failure(Exception):
    """A command cannot do what it was asked to.

    Attributes:
        exit_code: 1 where something failed, 2 where it cannot work as configured.
        details: lines to show above the sentence, such as the end of a log.
    """

    def __init__(self, sentence: str, exit_code: int = 1, details: tuple[str, ...] = ()) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code
        self.details = details


@contextmanager
def reported() -> Iterator[None]:
    """Turn a failure into its line and exit code; Ctrl-C into exit code 130."""
    try:
        yield
    except Failure as failure:
        for line in failure.details:
            err.out(f"  {line}", style="dim", highlight=False)
        err.out(f"tandem: {failure}", style="red", highlight=False)
        raise typer.Exit(failure.exit_code) from None
    except KeyboardInterrupt:
        err.out("tandem: interrupted", style="dim", highlight=False)
        raise typer.Exit(INTERRUPTED) from None

"""A file that a setting or an option names, and the sentence that says what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tandem.errors import StartupError

# Of one file: a bundle of all public authorities has a quarter of it.
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class NamedFile:
    """A file, and what named it.

    Attributes:
        setting: a variable or an option, for sentences.
        path: see there.
    """

    setting: str
    path: Path

    def read(self) -> bytes:
        """What is in it.

        Raises:
            StartupError: it is missing, unreadable or too large.
        """
        try:
            with self.path.open("rb") as file:
                content = file.read(_MAX_BYTES + 1)
        except OSError as error:
            raise self.unfit(f"cannot be read: {error.strerror or error}") from None
        if len(content) > _MAX_BYTES:
            raise self.unfit(f"is larger than {_MAX_BYTES >> 20} MiB")
        return content

    def unfit(self, fault: str) -> StartupError:
        """The error that says what is wrong with it."""
        return StartupError(f"{self.setting}: {self.path} {fault}")

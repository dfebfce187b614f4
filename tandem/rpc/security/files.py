"""Files that a setting or an option names, with errors that quote both; and watched files."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from tandem.errors import StartupError

# Largest file; a bundle of all public authorities has a quarter of this size.
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class NamedFile:
    """A file, and the setting that names it.

    Attributes:
        setting: a variable or an option, for error messages.
        path: of the file.
    """

    setting: str
    path: Path

    def read(self) -> bytes:
        """The file's content.

        Raises:
            StartupError: the file is missing, unreadable or too large.
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
        """The error that names the setting, the file and its fault."""
        return StartupError(f"{self.setting}: {self.path} {fault}")


_log = structlog.get_logger(__name__)

T = TypeVar("T")


class WatchedFiles(Generic[T]):
    """The content of some files, read again when they change, and replaced if the new one is valid.

    Files that belong together are not replaced in one step. Until all of them fit together, and as
    long as the new content is not valid, the old content stays in force.

    Args:
        paths: of the files.
        read: reads and combines all files; called in the thread that calls `look`.

    Raises:
        StartupError: the files are not valid now.
    """

    def __init__(self, paths: Sequence[Path], read: Callable[[], T]) -> None:
        self._paths = paths
        self._read = read
        self._lock = threading.Lock()
        self._seen = self._state()
        self._content = read()
        self._version = 0

    def look(self) -> tuple[int, T]:
        """The version number and the content in force; the version grows when the content does."""
        with self._lock:
            state = self._state()
            if state != self._seen:
                # The state is from before the read: a later change is seen at the next look.
                self._seen = state
                self._renew()
            return self._version, self._content

    def _renew(self) -> None:
        names = [str(path) for path in self._paths]
        try:
            content = self._read()
        except StartupError as error:
            _log.error("changed files are unfit, the old ones stay in force", reason=str(error))
            return
        if content != self._content:
            self._content = content
            self._version += 1
            _log.info("changed files are in force", files=names)

    def _state(self) -> list[tuple[int, int, int] | None]:
        """Differs if a file has been written, or replaced under the same name."""
        return [_state_of(path) for path in self._paths]


def _state_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size

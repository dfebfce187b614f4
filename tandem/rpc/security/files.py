"""A file that a setting or an option names, and the sentence that says what is wrong with it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import structlog

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


_log = structlog.get_logger(__name__)

T = TypeVar("T")


class Watched(Generic[T]):
    """What some files say. They are read again when they have changed, and taken if they are fit.

    Files that belong together are not replaced at once: between two of them the old content
    stays in force, as it does while what stands there is unfit.

    Args:
        paths: of the files.
        read: makes the content of them all; called on whatever thread asks.

    Raises:
        StartupError: they are unfit now.
    """

    def __init__(self, paths: Sequence[Path], read: Callable[[], T]) -> None:
        self._paths = paths
        self._read = read
        self._lock = threading.Lock()
        self._seen = self._state()
        self._content = read()
        self._version = 0

    def look(self) -> tuple[int, T]:
        """The content in force, and its number, which counts up whenever it is another one."""
        with self._lock:
            state = self._state()
            if state != self._seen:
                # Taken before the files are read: what comes later is seen the next time.
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
        """Differs when a file has been written, or replaced by another one behind its name."""
        return [_state_of(path) for path in self._paths]


def _state_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size

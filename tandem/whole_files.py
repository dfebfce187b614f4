"""Files that are whole at any moment, and a folder that one run has at a time."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from tandem.errors import StartupError


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """A new file, which takes the place of another when it is whole.

    Raises:
        OSError: it cannot be written; what was there stays.
    """
    fresh = path.with_name(f"{path.name}.new")
    try:
        with disk_errors():
            yield fresh
        fresh.replace(path)
    except Exception:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise


@contextmanager
def disk_errors() -> Iterator[None]:
    """Libraries say in errors of their own that a disk is full.

    Raises:
        OSError: in place of those.
    """
    try:
        yield
    except (SafetensorError, RuntimeError) as error:
        raise OSError(str(error)) from error


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold a folder; the system lets go of it when the process ends.

    Raises:
        StartupError: another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StartupError(
                f"another process is at work in {folder}: wait for it, or end it"
            ) from None
        yield

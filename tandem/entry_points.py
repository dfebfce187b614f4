"""What installed packages register with Tandem: found by name, imported only when asked for."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

import structlog

from tandem.errors import StartupError, first_line

_log = structlog.get_logger(__name__)


def registered(group: str, name: str) -> EntryPoint | None:
    """What a package registers under a name; None if none does. Imports nothing.

    Args:
        group: of entry points, such as "tandem.verifiers".
        name: letters, digits and underscores; others, such as a file's path, are never found.

    Raises:
        StartupError: several packages register the name.
    """
    if not name.isidentifier():
        return None
    try:
        found = tuple(entry_points(group=group, name=name))
    except Exception as error:  # of any package's metadata, which may have nothing to do with us
        _log.warning("entry points cannot be read", group=group, reason=first_line(error))
        return None
    if len(found) > 1:
        packages = ", ".join(sorted(map(_package, found)))
        raise StartupError(
            f"{group}: {name!r} is registered more than once ({packages}); uninstall all but one"
        )
    return found[0] if found else None


def imported(entry: EntryPoint) -> Any:
    """The object that an entry point names. This runs the package's code.

    Raises:
        StartupError: the import fails, in one sentence.
    """
    try:
        return entry.load()
    except (Exception, SystemExit) as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        raise refused(entry, f"cannot be imported from {entry.value}: {why}") from error


def refused(entry: EntryPoint, fault: str) -> StartupError:
    """The sentence on what is wrong with something registered.

    Args:
        entry: where it is registered.
        fault: follows its name: "lacks make".
    """
    return StartupError(f"{entry.group}: {entry.name!r} of the package {_package(entry)} {fault}")


def _package(entry: EntryPoint) -> str:
    return "(unknown)" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"

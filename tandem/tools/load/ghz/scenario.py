"""A load, as a configuration of ghz describes it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tandem.failure import Misconfigured

OK = "OK"
CANCELED = "Canceled"
# Settings with which ghz ends a stream itself.
_CUTS = ("stream-call-count", "stream-call-duration")


@dataclass(frozen=True)
class Scenario:
    """A configuration, and what it means.

    Attributes:
        name: the file's, without its extension.
        path: of the file.
        config: ghz's settings, by their names.
    """

    name: str
    path: Path
    config: dict[str, Any]

    def under(self, flags: Mapping[str, str]) -> Scenario:
        """The scenario with flags that override its file."""
        given = {name: int(value) if value.isdecimal() else value for name, value in flags.items()}
        return replace(self, config={**self.config, **given})

    @property
    def method(self) -> str:
        """The call's name: Generate or Complete."""
        return str(self.config.get("call", "")).rpartition(".")[2]

    @property
    def cuts(self) -> bool:
        """Whether ghz itself cancels calls."""
        return any(self.config.get(name) for name in _CUTS)

    @property
    def first_token_only(self) -> bool:
        """Whether a call ends with its first message, so that its latency is its TTFT."""
        return self.config.get("stream-call-count") == 1

    @property
    def expected(self) -> tuple[str, ...]:
        """Statuses that are no error."""
        return (OK, CANCELED) if self.cuts else (OK,)

    @property
    def loop(self) -> str:
        """How calls follow each other, in words."""
        config = self.config
        clients = f"{config.get('concurrency', 50)} at a time"
        if not config.get("async"):
            return clients
        if config.get("load-schedule", "const") == "const":
            return f"{config.get('rps', 'any number')} a second"
        return f"{config.get('load-start')} to {config.get('load-end')} a second"


def scenarios(folder: Path, names: Sequence[str]) -> list[Scenario]:
    """The configurations of a folder.

    Args:
        folder: with one JSON file per scenario; files without a `call` are skipped.
        names: of the scenarios to take; by default all, those that cancel calls last.

    Raises:
        Misconfigured: a scenario does not exist, or its file is no JSON.
    """
    found: dict[str, Scenario] = {}
    try:
        for path in sorted(folder.glob("*.json")):
            read = json.loads(path.read_text("utf-8"))
            if isinstance(read, dict) and "call" in read:
                found[path.stem] = Scenario(path.stem, path.resolve(), read)
    except OSError as error:
        raise Misconfigured(f"cannot read {error.filename}: {error.strerror}") from None
    except ValueError as error:
        raise Misconfigured(f"{path} is no JSON: {error}") from None
    if not found:
        raise Misconfigured(f"no configuration of ghz in {folder}; name another with --configs")
    if unknown := [name for name in names if name not in found]:
        raise Misconfigured(f"no scenario {unknown[0]!r}; there are {', '.join(found)}")
    if names:
        return [found[name] for name in names]
    return sorted(found.values(), key=lambda scenario: (scenario.cuts, scenario.name))

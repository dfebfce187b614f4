"""Tandem's three services for the length of a benchmark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tandem.tools.local.pair import Pair
from tandem.tools.local.stack import Stack, StackSettings, running

_OURS = {
    "LISTEN": "127.0.0.1:0",
    # No texts are running when a benchmark stops its services.
    "DRAIN_SECONDS": "2",
}


@contextmanager
def serving(
    pair: Pair,
    more: Mapping[str, Mapping[str, str]] | None = None,
    *,
    root: Path | None = None,
    modules: Mapping[str, str] | None = None,
) -> Iterator[Stack]:
    """Start the services, wait until they have settled on their fastest pass, and stop them at the
    end.

    Args:
        pair: to serve.
        more: further settings by service, without their prefix.
        root: of another checkout, whose services then run.
        modules: by service, modules to run instead of its own.

    Raises:
        Failure: a service cannot start.
    """
    services: dict[str, dict[str, str]] = {"orchestrator": {}, **pair.settings()}
    for name, settings in services.items():
        if root is not None:  # an earlier checkout knows no such setting
            settings.pop("MEMORY_SHARE", None)
        services[name] = {**_OURS, **settings, **(more or {}).get(name, {})}
    chosen = StackSettings(services, modules=modules or {}, root=root, inside=pair.inside)
    with running(chosen) as stack:
        yield stack

"""Tandem's three services for the length of a benchmark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tandem.tools.local.pair import Pair
from tandem.tools.local.stack import Stack, StackSettings, running

_OURS = {
    "LISTEN": "127.0.0.1:0",
    # Nothing runs any more when a benchmark stops its services.
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
    """Start the services, wait until they look for nothing faster any more, and end them.

    Args:
        pair: to serve.
        more: settings of a service, by its name, without their prefix.
        root: of another checkout, whose services then run.
        modules: to run instead of a service's own, by its name.

    Raises:
        Failure: a service cannot start.
    """
    services: dict[str, dict[str, str]] = {"orchestrator": {}, **pair.settings()}
    for name, settings in services.items():
        services[name] = {**_OURS, **settings, **(more or {}).get(name, {})}
    with running(StackSettings(services, modules=modules or {}, root=root)) as stack:
        yield stack

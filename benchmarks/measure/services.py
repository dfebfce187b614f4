"""Tandem's three services for the length of a benchmark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tandem.tools.local.pair import Pair
from tandem.tools.local.stack import Stack, StackSettings, running

# Nothing runs any more when a benchmark stops its services.
_ENDING = {"DRAIN_SECONDS": "2"}


@contextmanager
def serving(pair: Pair, **trace_files: Path) -> Iterator[Stack]:
    """Start the services and end them.

    Args:
        pair: to serve.
        trace_files: where a service writes its spans, by its name.

    Raises:
        Failure: a service cannot start.
    """
    services = _settings(pair)
    for name, path in trace_files.items():
        services[name]["TRACE_FILE"] = str(path)
    with running(StackSettings(services)) as stack:
        yield stack


@contextmanager
def drafting(pair: Pair, drafter: Mapping[str, str]) -> Iterator[Stack]:
    """The same with more settings of the drafter, without their prefix.

    Raises:
        Failure: a service cannot start.
    """
    services = _settings(pair)
    services["drafter"] |= drafter
    with running(StackSettings(services)) as stack:
        yield stack


def _settings(pair: Pair) -> dict[str, dict[str, str]]:
    services = {"orchestrator": {"LISTEN": "127.0.0.1:0"}, **pair.settings()}
    return {name: {**settings, **_ENDING} for name, settings in services.items()}

"""CPU seconds of each test file, including the processes that it starts and that end with it.

Run `pytest -p tests.support.pytest_runs.cpu_by_file`. The collection of tests is not counted.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator
from typing import Any

import pytest

from tests.support.processes.fork_server import fork_server

_SECONDS: dict[str, float] = defaultdict(float)


def _spent() -> float:
    """CPU time of this process, its ended children and forked services, in seconds."""
    forked = fork_server().cpu_seconds if fork_server.cache_info().currsize else 0.0
    return sum(os.times()[:4]) + forked


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool, bool]:
    before = _spent()
    try:
        return (yield)
    finally:
        _SECONDS[item.location[0]] += _spent() - before


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["cpu_by_file"] = dict(_SECONDS)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    for name, seconds in getattr(node, "workeroutput", {}).get("cpu_by_file", {}).items():
        _SECONDS[name] += seconds


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section(f"CPU seconds by file, {sum(_SECONDS.values()):.0f} in all")
    for name, seconds in sorted(_SECONDS.items(), key=lambda item: -item[1]):
        terminalreporter.line(f"{seconds:8.1f}  {name}")

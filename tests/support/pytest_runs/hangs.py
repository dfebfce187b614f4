"""A test that hangs for ever ends its run, with the stacks of all threads.

pytest-timeout ends what waits in Python. It ends neither a thread that the test left waiting, which
the event loop joins when it closes, nor a call that never returns from C.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator

import pytest

# Where pytest's own faulthandler writes: what a test prints is captured.
from _pytest.faulthandler import fault_handler_stderr_fd_key

# Beyond the time that pytest-timeout gives a test, and for what it leaves behind.
_SECONDS = 300.0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    marker = item.get_closest_marker("timeout")
    given = marker.args[0] if marker is not None else item.config.getini("timeout")
    _end_after(float(given) + _SECONDS, item)
    yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    _end_after(_SECONDS, item)  # pytest forgets the first one when a test fails
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _end_after(seconds: float, item: pytest.Item) -> None:
    told = item.config.stash.get(fault_handler_stderr_fd_key, None)
    if told is not None:
        faulthandler.dump_traceback_later(seconds, exit=True, file=told)

"""What campaigns protect: each marker says it, and a run of campaigns prints it at its end.

`pytest.mark.campaign(protects, beside)`: what the test shows, and which tests of `make test` notice
the same mistakes sooner.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

# The files of each pair.
_Reasons = dict[tuple[str, str], set[str]]
_REASONS: _Reasons = defaultdict(set)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("campaign"):
            if len(mark.args) != 2:
                raise pytest.UsageError(
                    f"{item.nodeid}: campaign(protects, beside) says what it shows, and what of"
                    " `make test` shows it sooner"
                )
            _REASONS[mark.args].add(item.location[0].removeprefix("tests/"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["campaigns"] = [
            (*pair, sorted(files)) for pair, files in _REASONS.items()
        ]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    for protects, beside, files in getattr(node, "workeroutput", {}).get("campaigns", ()):
        _REASONS[protects, beside].update(files)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.option.markexpr != "campaign":
        return
    terminalreporter.section("campaigns: what they protect, and what does in make test")
    for (protects, beside), files in sorted(_REASONS.items(), key=lambda item: min(item[1])):
        terminalreporter.line(f"{', '.join(sorted(files))}: {protects}")
        terminalreporter.line(f"    in make test: {beside}")

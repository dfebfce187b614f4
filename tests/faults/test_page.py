"""docs/faults.md names a test for each promise, and each of these tests exists."""

from __future__ import annotations

import re

from tandem.rpc.channel import KEEPALIVE_TIME_MS, KEEPALIVE_TIMEOUT_MS
from tests.support.repository import ROOT

PAGE = (ROOT / "docs" / "faults.md").read_text()


def test_each_promise_is_held_by_a_test() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    there = set(re.findall(r"^(?:async )?def (test_\w+)\(", sources, re.MULTILINE))
    assert named <= there, named - there
    rows = [line for line in PAGE.splitlines() if line.startswith("| a ") and line.count("|") == 4]
    assert rows
    assert all("`test_" in row for row in rows)


def test_its_bounds_are_those_of_the_code() -> None:
    assert f"| {KEEPALIVE_TIME_MS // 1000} + {KEEPALIVE_TIMEOUT_MS // 1000} s |" in PAGE

"""An audit that could not find anything fails."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.audit import audit

KNOWN = {"id": "PYSEC-2018-28", "aliases": ["CVE-2018-18074"], "fix_versions": ["2.20.0"]}


def answer(*packages: dict[str, Any]) -> str:
    return json.dumps({"dependencies": packages, "fixes": []})


class Database:
    """pip-audit beside a database: what it answers for the known package and for ours."""

    def __init__(self, known: str, ours: str, code: int = 0, error: str = "") -> None:
        self.answers = {"known.txt": known, "requirements.txt": ours}
        self.code, self.error = code, error
        self.asked: list[str] = []

    def __call__(self, arguments: Sequence[str]) -> tuple[int, str, str]:
        (path,) = (Path(each).name for each in arguments if each.endswith(".txt"))
        self.asked.append(path)
        return self.code, self.answers[path], self.error


def package(*vulns: dict[str, Any]) -> dict[str, Any]:
    return {"name": "requests", "version": "2.19.0", "vulns": list(vulns)}


OURS = Path("requirements.txt")


def test_it_says_how_many_packages_which_database_and_which_day() -> None:
    database = Database(answer(package(KNOWN)), answer({"name": "a", "version": "1", "vulns": []}))
    code, (line,) = audit(OURS, "pypi", database)
    assert code == 0
    assert line.startswith("audit: 1 packages, 0 advisories; asked https://pypi.org/pypi/")
    assert line.endswith(" UTC")
    assert database.asked == ["known.txt", "requirements.txt"]


def test_an_advisory_is_a_line_and_the_tools_exit_code() -> None:
    found = answer(package(KNOWN, {"id": "X-1", "aliases": [], "fix_versions": []}))
    code, lines = audit(OURS, "osv", Database(found, found, code=1))
    assert code == 1
    assert lines[:2] == [
        "requests 2.19.0: PYSEC-2018-28 CVE-2018-18074; mended in 2.20.0",
        "requests 2.19.0: X-1; mended in no release",
    ]


@pytest.mark.parametrize(
    "known", ["", answer(package()), answer(package({**KNOWN, "aliases": []}))]
)
def test_a_database_that_does_not_know_a_known_advisory_was_not_asked(known: str) -> None:
    database = Database(known, answer(package()), error="one\nrequests: not found on PyPI\n")
    code, lines = audit(OURS, "pypi", database)
    assert code == 1
    assert lines[0] == "requests: not found on PyPI"
    assert "no database of advisories was asked" in lines[1]
    assert database.asked == ["known.txt"]


def test_packages_that_cannot_be_looked_up_fail_the_audit() -> None:
    code, lines = audit(OURS, "pypi", Database(answer(package(KNOWN)), "", error="timed out"))
    assert (code, lines) == (1, ["timed out", "audit: the packages could not be looked up"])

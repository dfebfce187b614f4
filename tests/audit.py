"""Known vulnerabilities of everything that is pinned: `make audit`.

    python -m tests.audit requirements.txt [--service pypi|osv|esms]

pip-audit takes the answer of any server. A mirror of PyPI may know the packages and none of their
advisories, and then nothing would ever be found. So a package with a known advisory is asked for
first, and without that advisory the audit fails. The last line says which database was asked, when.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

# https://nvd.nist.gov/vuln/detail/CVE-2018-18074: all databases have it.
_KNOWN, _ADVISORY = "requests==2.19.0", "CVE-2018-18074"
_WHERE = {
    "pypi": "https://pypi.org/pypi/<package>/<version>/json",
    "osv": "https://api.osv.dev/v1/query",
    "esms": "https://ecosyste.ms",
}
_TOOL = ("--quiet", "--from", "pip-audit==2.10.1", "pip-audit")

# Runs pip-audit with these arguments: its exit code, standard output and standard error.
Tool = Callable[[Sequence[str]], tuple[int, str, str]]


def run_tool(arguments: Sequence[str]) -> tuple[int, str, str]:
    """pip-audit in an environment of its own."""
    uv = str(Path(sys.executable).with_name("uv"))
    command = [uv, "tool", "run", *_TOOL, "--strict", "--progress-spinner=off", "--format=json"]
    ended = subprocess.run([*command, *arguments], capture_output=True, text=True)
    return ended.returncode, ended.stdout, ended.stderr


def audit(requirements: Path, service: str, tool: Tool) -> tuple[int, list[str]]:
    """Ask a database of advisories for pinned packages.

    Args:
        requirements: pinned, with hashes.
        service: the database, as pip-audit names it.
        tool: pip-audit.

    Returns:
        The exit code, and what to print: a line an advisory, then what was asked.
    """
    with TemporaryDirectory() as scratch:
        known = Path(scratch) / "known.txt"
        known.write_text(f"{_KNOWN}\n")
        chosen = ["--vulnerability-service", service, "--disable-pip", "--requirement"]
        _, output, error = tool([*chosen, str(known), "--no-deps"])
        names = {name for _, each in _advisories(output) for name in (each["id"], *each["aliases"])}
        if _ADVISORY not in names:
            return 1, [
                *_last_line(error),
                f"audit: no database of advisories was asked: {_WHERE[service]} does not know"
                f" {_ADVISORY} of {_KNOWN}, as a mirror without advisories. Run this where it is"
                " reached, or ask another one: make audit SERVICE=pypi|osv|esms",
            ]
        code, output, error = tool([*chosen, str(requirements), "--require-hashes"])
    packages = _packages(output)
    if not packages:
        return code or 1, [*_last_line(error), "audit: the packages could not be looked up"]
    found = [
        f"{package['name']} {package['version']}: {' '.join((each['id'], *each['aliases']))};"
        f" mended in {', '.join(each['fix_versions']) or 'no release'}"
        for package, each in _advisories(output)
    ]
    asked = f"asked {_WHERE[service]} at {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    return code, [*found, f"audit: {len(packages)} packages, {len(found)} advisories; {asked}"]


def _packages(output: str) -> list[dict[str, Any]]:
    try:
        return list(json.loads(output)["dependencies"])
    except ValueError:  # it ended before it had an answer
        return []


def _advisories(output: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(package, each) for package in _packages(output) for each in package["vulns"]]


def _last_line(error: str) -> list[str]:
    return error.strip().splitlines()[-1:]


def main() -> None:
    """See above; exit code 1 if an advisory is found, or no database could be asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("requirements", type=Path)
    parser.add_argument("--service", choices=_WHERE, default="pypi")
    chosen = parser.parse_args()
    code, lines = audit(chosen.requirements, chosen.service, run_tool)
    print(*lines, sep="\n")
    sys.exit(code)


if __name__ == "__main__":
    main()

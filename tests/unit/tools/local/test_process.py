"""A process that a tool starts: which packages it runs, where, and how it ends."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tandem.tools.local.process import ServiceProcess

SERVICE = """
import json, os, signal, sys
import process
signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(os.environ["CODE"])))
print(json.dumps({"event": "listening", "port": 7, "at": [os.getcwd(), process.HERE]}), flush=True)
signal.pause()
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Packages of a service and of what it imports, which has the name of a file of ours."""
    for name, file, text in (
        ("service", "__main__.py", SERVICE),
        ("process", "__init__.py", "HERE = __file__"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(text)
    return tmp_path


def started(root: Path) -> ServiceProcess:
    """The service, once it listens."""
    environment = {"CODE": "3"}
    process = ServiceProcess("target", "service", "0.0.0.0", environment, root / "log", root=root)
    deadline = time.monotonic() + 30
    while process.port is None:
        assert time.monotonic() < deadline, process.last_lines()
        time.sleep(0.01)
    return process


def test_another_checkout_runs_its_own_packages_in_its_own_folder(checkout: Path) -> None:
    process = started(checkout)
    assert process.address == "127.0.0.1:7"
    assert process.stop() == 3
    assert str([str(checkout), str(checkout / "process/__init__.py")]) in process.last_lines()[0]


def test_a_log_goes_on_and_a_killed_process_says_so(checkout: Path) -> None:
    for _ in range(2):
        process = started(checkout)
        process.kill()
        assert process.ending() == "was ended by SIGKILL"
    assert (checkout / "log").read_text().count("listening") == 2


def test_a_service_whose_parent_is_gone_is_asked_to_end(checkout: Path) -> None:
    """The system closes the parent's end of the pipe, however the parent ends."""
    process = started(checkout)
    assert process._popen.stdin is not None
    process._popen.stdin.close()
    assert process._popen.wait(30) == 3

"""A test that never ends, ends its run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.repository import ROOT
from tests.support.waiting import HANG_SECONDS

RUN = """
import sys, pytest, tests.support.pytest_runs.hangs
tests.support.pytest_runs.hangs._SECONDS = 0.2
options = ["-q", "-o", "timeout=0.1", "-o", "asyncio_mode=auto", "-o", "cache_dir=none"]
pytest.main([*options, "-p", "tests.support.pytest_runs.hangs", *sys.argv[1:]])
"""
HANGS = """
import asyncio, threading

async def test_it():
    await asyncio.to_thread(threading.Event().wait)
"""


def test_a_thread_that_waits_for_ever_is_shown_and_ends_the_run(tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(HANGS)
    (tmp_path / "pytest.ini").touch()
    run = subprocess.run(
        [sys.executable, "-c", RUN, str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert run.returncode == 1
    assert "F" in run.stdout
    assert "Timeout (0:00:00.200000)!" in run.stderr
    assert "shutdown_default_executor" in run.stderr or "run_until_complete" in run.stderr

"""A test that never ends, ends its run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.repository import ROOT
from tests.support.waiting import HANG_SECONDS

RUN = """
import sys, pytest
options = ["-q", "-o", "timeout=600", "-o", "asyncio_mode=auto", "-o", "cache_dir=none"]
pytest.main([*options, "-p", "tests.support.pytest_runs.hangs", *sys.argv[1:]])
"""
HANGS = """
import asyncio, threading
from tests.support.pytest_runs import hangs

async def test_it():
    hangs._SECONDS = 0.2  # for what is left of it
    asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
    raise ValueError
"""


def test_a_thread_that_a_failed_test_left_waiting_ends_the_run_and_is_shown(tmp_path: Path) -> None:
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
    assert "Timeout (0:00:00.200000)!" in run.stderr
    assert "shutdown_default_executor" in run.stderr or "run_until_complete" in run.stderr

"""tandem top, as a command."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tandem.failure import Misconfigured
from tandem.telemetry.metrics import catalog as metrics
from tandem.tools.cli.metrics_addresses import (
    METRICS_ADDRESSES,
    endpoints_of,
    variable_of_metrics,
)
from tests.support.processes.ports import free_port
from tests.support.repository import ROOT
from tests.support.waiting import HANG_SECONDS
from tests.unit.tools.watch.test_watch import orchestrator, serving, target


def top(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if "METRICS_LISTEN" not in name}
    return subprocess.run(
        [sys.executable, "-m", "tandem.tools.cli", "top", *arguments],
        env={**clean, **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )


def test_a_plain_line_a_look_where_there_is_no_terminal() -> None:
    own = orchestrator()
    own.counter(metrics.NUM_DRAFTS).value += 1
    with serving(own) as front, serving(target(25)) as back:
        away = f"127.0.0.1:{free_port()}"
        result = top(front, back, away, "--interval", "0.1", "--count", "3")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 3
    for line in lines:
        assert line.startswith("0.0 tokens/s  0.0 rounds/s  acceptance -  ")
        assert "orchestrator 3 open  target 2 open 1 waiting KV 25.0%" in line
        assert line.endswith(f"{away} is away")


def test_tables_on_a_terminal() -> None:
    with serving(orchestrator()) as front, serving(target(25)) as back:
        listen = {"TANDEM_ORCHESTRATOR_METRICS_LISTEN": front, "TANDEM_TARGET_METRICS_LISTEN": back}
        result = top("--interval", "0.1", "--count", "1", FORCE_COLOR="1", **listen)
    assert result.returncode == 0, result.stderr
    for word in ("tokens/s", "orchestrator", "target", "25.0%", "over the last"):
        assert word in result.stdout


def test_where_nobody_names_any_it_looks_where_up_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    for service in METRICS_ADDRESSES:
        monkeypatch.delenv(variable_of_metrics(service), raising=False)
    assert endpoints_of(None, usual=True) == list(METRICS_ADDRESSES.values())
    with pytest.raises(Misconfigured, match="METRICS_LISTEN"):
        endpoints_of(None)
    monkeypatch.setenv("TANDEM_TARGET_METRICS_LISTEN", "127.0.0.1:5")
    assert endpoints_of(None, usual=True) == ["127.0.0.1:5"]


def test_what_is_no_address() -> None:
    result = top("localhost")
    assert result.returncode == 2
    assert result.stderr.splitlines() == ["tandem: 'localhost' is not HOST:PORT"]


def test_nobody_answers() -> None:
    result = top(f"127.0.0.1:{free_port()}")
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("tandem: no metrics at 127.0.0.1:")

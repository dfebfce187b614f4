"""The benchmark and the load generator as people run them, in their smallest size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from benchmarks.measure.services import serving
from tandem.cli.main import app
from tandem.local.pair import Pair
from tests.processes import ROOT

RUN_SECONDS = 300
# Threads that wait for each other while other tests have the cores take minutes.
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def test_a_quick_run_measures_every_row_and_sweep(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.bench", "--quick", "--sweeps"]
    run = subprocess.run(
        [*command, "--results", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=ONE_THREAD,
        timeout=RUN_SECONDS,
    )
    assert run.returncode == 0, run.stderr
    (table,) = tmp_path.glob("*.txt")
    assert "transformers assisted" in table.read_text()
    (result,) = tmp_path.glob("*.json")
    found = json.loads(result.read_text())
    assert {"machine", "torch", "commit"} <= set(found["environment"])
    names = {row["name"] for row in found["rows"]}
    assert {
        "transformers generate",
        "transformers assisted",
        "Tandem",
        "Tandem token",
        "Tandem block",
        "Tandem greedy_block",
        "floor in process",
        "floor of bandwidth",
    } <= names
    assert all(row["tokens_per_s"] > 0 for row in found["rows"])
    block = next(row for row in found["rows"] if row["name"] == "Tandem block")
    assert block["round"]["p50"] <= block["round"]["p99"]
    assert 1 <= block["block_efficiency"] <= 1 + block["gamma"]
    assert {(r["temperature"], r["other"]["system"]) for r in found["run_off"]} == {
        (temperature, f"transformers {other}")
        for temperature in (0, 1)
        for other in ("generate", "assisted", "assisted, defaults")
    }
    assert all(found["sweeps"].values())
    assert not any(load["report"]["errors"] for load in found["sweeps"]["concurrency"])
    delayed = [p for p in found["sweeps"]["network_delay"] if p["delay_ms"] == 5]
    # A plain round takes two hops, a drafted one four; timers may be a little early.
    assert all(p["report"]["round"]["p50"] > (19 if p["gamma"] else 9) for p in delayed)
    assert len(list(tmp_path.glob("*.svg"))) == len(found["sweeps"])


def test_tandem_bench_loads_running_services() -> None:
    with serving(Pair()) as stack:
        load = ["bench", "-a", stack.addresses["orchestrator"], "--texts", "4", "-n", "8"]
        closed = CliRunner().invoke(app, [*load, "-c", "2", "--warm-up", "0", "--json"])
        rate = CliRunner().invoke(app, [*load, "--rate", "20", "--verifier", "token"])
        refused = CliRunner().invoke(app, [*load, "--verifier", "nonsense"])
        again = CliRunner().invoke(app, [*load, "--verifier", "nonsense", "--json"])
    found = json.loads(closed.stdout)
    assert found["texts"] == len(found["timelines"]) == 4
    assert found["block_efficiency"] >= 1
    assert "acceptance" in rate.stdout
    assert rate.exit_code == 0
    assert refused.exit_code == 1
    assert "INVALID_ARGUMENT" in refused.stderr
    assert "4 x INVALID_ARGUMENT: verifier 'nonsense' is unknown" in refused.stdout
    (error,) = json.loads(again.stdout)["errors"]
    assert error.startswith("INVALID_ARGUMENT: verifier 'nonsense' is unknown")


def test_tandem_bench_says_when_nobody_answers() -> None:
    run = CliRunner().invoke(app, ["bench", "-a", "127.0.0.1:1"])
    assert run.exit_code == 1
    assert "no orchestrator answers" in run.stderr

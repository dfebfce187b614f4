"""The benchmark and the load generator as people run them, in their smallest size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandem.tools.cli.main import app
from tandem.tools.planning.bound import NOTHING
from tests.support.processes.services import trio
from tests.support.repository import ROOT

WHOLE = pytest.mark.campaign(
    "`make bench` and `tandem bench` measure every row, and plans follow from them",
    "unit/benchmarks, unit/tools/load, unit/tools/planning",
)

RUN_SECONDS = 1800  # on a busy machine
# Threads that wait for each other while other tests have the cores take minutes.
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


@WHOLE
@pytest.mark.timeout(RUN_SECONDS)
def test_a_quick_run_measures_every_row_and_sweep(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.bench", "--quick", "--sweeps"]
    run = subprocess.run(
        [*command, "--results", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=ONE_THREAD,
    )
    assert run.returncode == 0, run.stderr
    (table,) = tmp_path.glob("*.txt")
    assert "transformers assisted" in table.read_text()
    (result,) = tmp_path.glob("*.json")
    found = json.loads(result.read_text())
    assert {"machine", "torch", "commit"} <= set(found["environment"])
    names = {row["name"] for row in found["rows"]}
    assert {
        "transformers",
        "transformers assisted",
        "transformers defaults",
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
    assert {(r["temperature"], r["other"]["rule"]) for r in found["run_off"]} == {
        (temperature, rule) for temperature in (0, 1) for rule in ("", "assisted", "defaults")
    }
    assert {r["other"]["engine"] for r in found["run_off"]} == {"transformers"}
    assert all(found["sweeps"].values())
    assert not any(load["report"]["errors"] for load in found["sweeps"]["concurrency"])
    delayed = [p for p in found["sweeps"]["network_delay"] if p["delay_ms"] == 5]
    # A plain round takes two hops, a drafted one four; timers may be a little early.
    assert all(p["report"]["round"]["p50"] > (19 if p["gamma"] else 9) for p in delayed)
    assert len(list(tmp_path.glob("*.svg"))) == len(found["sweeps"])


@WHOLE
def test_tandem_bench_loads_running_services(tmp_path: Path) -> None:
    with trio(tmp_path) as services:
        load = ["bench", "-a", services.orchestrator.address, "--texts", "4", "-n", "8"]
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


@WHOLE
def test_a_sweep_and_plans_from_what_was_measured(tmp_path: Path) -> None:
    """Both measurements are of the same texts, and so foretell about the same."""
    drafter, target, orchestrator = (
        {"TRACE_FILE": str(tmp_path / f"{name}.jsonl")}
        for name in ("drafter", "target", "orchestrator")
    )
    with trio(tmp_path, drafter=drafter, target=target, orchestrator=orchestrator) as services:
        load = ["bench", "-a", services.orchestrator.address, "--json"]
        data = ["--data", str(ROOT / "deploy" / "ghz" / "prompts.json")]
        # Any text is good in time, however slow the machine.
        patient = ["--slo-ttft-ms", "60000", "--slo-tpot-ms", "60000"]
        run = CliRunner().invoke(app, [*load, *data, "--texts", "12", "-c", "4", *patient])
        objective = ["--slo-ttft-ms", "0", "--slo-tpot-ms", "0", "--slo-latency-ms", "1"]
        swept = CliRunner().invoke(app, [*load, "--sweep", "--seconds", "1", "-n", "8", *objective])
        both = CliRunner().invoke(app, [*load, *data, "-n", "8"])
        texts = CliRunner().invoke(app, [*load, "--sweep", "--texts", "8"])
    bench = tmp_path / "run.json"
    bench.write_text(run.stdout)
    found = json.loads(run.stdout)
    assert found["goodput"]["share"] == 1
    assert all(text["summary"]["stages"] for text in found["timelines"])
    # Within a millisecond no text is good, and half of a text is asked for in no second.
    assert swept.exit_code == 1
    assert "no rate held the objective: latency ≤ 1 ms" in swept.stderr
    sweep = json.loads(swept.stdout)
    assert sweep["highest_rate"] is None
    assert [level["rate"] for level in sweep["levels"]] == [1]
    assert both.exit_code == texts.exit_code == 2

    needed = ["--rate", "3", "--price-target", "4", "--json", *patient]
    plans, speeds = [], []
    for source in (str(bench), str(tmp_path)):
        if source == str(tmp_path):
            bench.unlink()
        planned = CliRunner().invoke(app, ["plan", source, *needed])
        assert planned.exit_code == 0, planned.stderr
        plans.append(json.loads(planned.stdout))
        what = ["plan", source, "--targets", "1", "--clients", "4", "--json"]
        told = CliRunner().invoke(app, what)
        assert told.exit_code == 0, told.stderr
        speeds.append(json.loads(told.stdout)["tokens_per_s"])
    for plan in plans:
        assert plan["fleet"]["targets"] >= 1
        assert plan["fleet"]["price_a_million_tokens"] > 0
        assert plan["fleet"]["good"] >= 0.99
        assert (plan["bound"] == NOTHING) == (plan["fleet"]["targets"] == 1)
    assert max(speeds) < 3 * min(speeds)


def test_a_plan_says_what_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text('{\n"timelines": [{}]}')
    for arguments, reason in (
        (["plan", str(path)], "--rate"),
        (["plan", str(path), "--rate", "1", "--clients", "2"], "--targets"),
        (["plan", str(path), "--rate", "1"], "no JSON of `tandem bench --json`"),
        (["plan", str(path), str(path), "--rate", "1"], "one JSON of `tandem bench` at a time"),
        (["plan", str(tmp_path / "nowhere"), "--rate", "1"], "nowhere"),
    ):
        run = CliRunner().invoke(app, arguments)
        assert run.exit_code == 2, arguments
        assert reason in run.stderr
    path.write_text('{\n"timelines": []}')
    run = CliRunner().invoke(app, ["plan", str(path), "--rate", "1"])
    assert run.exit_code == 1
    assert "no text that ended well was drafted" in run.stderr


def test_tandem_bench_says_when_nobody_answers() -> None:
    run = CliRunner().invoke(app, ["bench", "-a", "127.0.0.1:1"])
    assert run.exit_code == 1
    assert "no orchestrator answers" in run.stderr

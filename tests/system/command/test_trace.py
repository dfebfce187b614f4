"""`tandem trace` as people run it."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.repository import ROOT
from tests.support.traces import COSTS, Tape, recorded, request
from tests.system.command.test_up import PLAIN, invoke, one_line, tandem

ROUNDS = [(4, 3), (4, 0), (4, 4), (1, 1)]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return recorded(tmp_path / "trace.jsonl", 12, ROUNDS)


@pytest.mark.parametrize("command", ["", "report", "compare", "export", "view", "what-if"])
def test_help_reads_well(command: str) -> None:
    run = invoke("trace", *filter(None, [command]), "--help")
    assert run.exit_code == 0, run.stderr
    assert "Usage:" in run.stdout


def test_reads_without_grpc_and_model_libraries(trace: Path) -> None:
    blocked = "import sys; sys.modules['torch'] = sys.modules['grpc'] = None"
    program = (
        f"{blocked}; from tandem.tools.cli.main import app;"
        f" app(['trace', 'report', {str(trace)!r}])"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert run.returncode == 0, run.stderr


def test_a_report_shows_every_part(trace: Path) -> None:
    run = invoke("trace", "report", str(trace))
    assert run.exit_code == 0, run.stderr
    for part in ("12 requests, 48 rounds", "verify.forward", "100.0%", "block", "request-12"):
        assert part in run.stdout


def test_a_report_as_json(trace: Path) -> None:
    found = json.loads(invoke("trace", "report", "--json", str(trace)).stdout)
    assert sum(row["share"] for row in found["stages"]) == pytest.approx(1)
    by_name = {(row["service"], row["stage"]): row for row in found["stages"]}
    forward = by_name["target", "verify.forward"]
    assert forward["count"] == 48
    assert forward["p50"] == pytest.approx(COSTS.verify_pass, rel=0.006)
    assert by_name["drafter", "draft.forward"]["p50"] == pytest.approx(4.0, rel=0.006)
    assert found["acceptance"]["block"]["drafted"] == [48, 36, 36, 36]
    assert found["acceptance"]["block"]["accepted"] == [36, 24, 24, 12]
    assert len(found["slowest"]) == 10
    waits = {(row["step"], row["batch_size"]): row for row in found["waits"]}
    assert waits["verify", 1]["waited"] == 0
    assert waits["draft", 1]["waited"] == 12  # of the short drafts


def test_a_requests_waterfall(trace: Path) -> None:
    run = invoke("trace", "report", str(trace), "--request", "request-7", "--round", "2")
    assert run.exit_code == 0, run.stderr
    assert "100.0%" in run.stdout
    lines = run.stdout.splitlines()
    assert sum("verify.forward" in line for line in lines) == 2  # the table's, and round 2's
    assert any("round 2: 0 of 4 kept" in line for line in lines)
    asked = invoke("trace", "report", str(trace), "--request", "request-7", "--json")
    found = json.loads(asked.stdout)
    assert found["request_id"] == "request-7"
    assert sum(row["share"] for row in found["stages"]) == pytest.approx(1)
    spent = sum(part["duration_ms"] for part in found["critical_path"])
    assert spent == pytest.approx(found["wall_ms"])


def test_requests_are_found_by_the_beginning_of_an_id(trace: Path) -> None:
    several = invoke("trace", "report", str(trace), "--request", "req")
    assert several.exit_code == 2
    assert "is the beginning of several" in one_line(several)
    nobody = invoke("trace", "report", str(trace), "--request", "nobody")
    assert nobody.exit_code == 2
    assert "no request 'nobody'" in one_line(nobody)
    exact = invoke("trace", "report", str(trace), "--request", "request-1")
    assert exact.exit_code == 0


def test_two_recordings_compared(trace: Path, tmp_path: Path) -> None:
    slower = recorded(tmp_path / "b.jsonl", 12, ROUNDS, replace(COSTS, verify_pass=6.0))
    run = invoke("trace", "compare", str(trace), str(slower))
    assert run.exit_code == 0, run.stderr
    (line,) = [line for line in run.stdout.splitlines() if "verify.forward" in line]
    assert "+1 (+20.0%)" in line
    assert "higher" in line
    same = invoke("trace", "compare", str(trace), str(trace))
    assert "no difference seen between the two recordings" in same.stdout
    found = json.loads(invoke("trace", "compare", str(trace), str(slower), "--json").stdout)
    moved = {line["name"] for line in found["lines"] if line["moved"]}
    assert "target verify.forward ms/round" in moved
    assert "drafter draft.forward ms/round" not in moved
    few = recorded(tmp_path / "few.jsonl", 2, ROUNDS)
    assert "an interval needs 8" in invoke("trace", "compare", str(trace), str(few)).stdout


def test_exports(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    run = invoke("trace", "export", str(trace), "--format", "perfetto", "-o", str(out))
    assert run.exit_code == 0, run.stderr
    assert json.loads(out.read_text())["traceEvents"]
    table = invoke("trace", "export", str(trace), "--format", "csv")
    assert len(list(csv.DictReader(table.stdout.splitlines()))) > 12 * 4 * 10
    nowhere = invoke("trace", "export", str(trace), "-f", "csv", "-o", str(tmp_path / "a" / "b"))
    assert nowhere.exit_code == 2
    assert "cannot write" in one_line(nowhere)


def test_a_page(trace: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    run = invoke("trace", "view", str(trace), "-o", str(page))
    assert run.exit_code == 0, run.stderr
    assert run.stdout == f"{page}\n"
    assert "request-12" in page.read_text()
    assert invoke("trace", "view", str(trace), "-o", str(page), "--request", "request-12").stdout
    assert re.findall(r'"id":"(request-\d+)"', page.read_text()) == ["request-12"]
    nowhere = invoke("trace", "view", str(trace), "-o", str(tmp_path / "a" / "b"))
    assert nowhere.exit_code == 2
    assert "cannot write" in one_line(nowhere)


def test_what_if(trace: Path) -> None:
    run = invoke("trace", "what-if", str(trace))
    assert run.exit_code == 0, run.stderr
    for part in ("Worth most to a request", "a free network", "verifier token", "Assumed:"):
        assert part in run.stdout
    found = json.loads(invoke("trace", "what-if", "--json", str(trace)).stdout)
    assert len(found["gammas"]) == 2 * 16
    assert found["worth_most"] in {change["change"] for change in found["changes"]}


def test_standard_input_and_what_was_left_out(trace: Path) -> None:
    run = tandem("trace", "report", "-", stdin=trace.read_text() + "cut of")
    assert run.returncode == 0, run.stderr
    assert "12 requests" in run.stdout
    assert "left out: the end of standard input, which is cut off" in run.stdout
    assert run.stderr == ""


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "no span of Tandem"),
        ('{"resourceSpans": []}', "no span of Tandem"),
        (Tape().line("orchestrator"), "no span of Tandem"),
    ],
)
def test_files_without_a_span_are_one_line(content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text(content)
    for command in (["report"], ["what-if"], ["export", "-f", "csv"]):
        run = invoke("trace", *command, str(path))
        assert run.exit_code == 2
        assert said in one_line(run)


def test_a_broken_pipe_is_no_traceback(trace: Path) -> None:
    program = f"{sys.executable} -m tandem.tools.cli trace export {trace} -f csv | head -n 1"
    run = subprocess.run(
        ["bash", "-c", program], capture_output=True, text=True, cwd=ROOT, env=PLAIN, check=False
    )
    assert run.stdout.startswith("request_id,")
    assert "Traceback" not in run.stderr


def test_a_request_without_rounds(tmp_path: Path) -> None:
    tape = Tape()
    request(tape, [])
    path = tape.write(tmp_path / "trace.jsonl")
    assert invoke("trace", "report", str(path)).exit_code == 0
    assert invoke("trace", "report", str(path), "--request", "request-1").exit_code == 0

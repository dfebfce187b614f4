"""Ctrl-C in a load: the calls made are reported, and the exit code says that some are missing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.tools.cli.exit_codes import so_far
from tandem.tools.cli.main import app
from tandem.tools.load.ghz.calls import Call, Calls
from tandem.tools.load.ghz.campaign import Campaign
from tandem.tools.load.ghz.outcome import Outcome
from tandem.tools.load.ghz.scenario import Scenario
from tests.support.waiting import wait_until

_SECONDS = 30.0


class Orchestrator(orchestrator_pb2_grpc.OrchestratorServiceServicer):
    """Answers as many texts as it is told to at once, and no further one."""

    def __init__(self, texts: int) -> None:
        self.left = texts
        self.sent = 0

    def GetModelInfo(self, request: Any, context: Any) -> pb.GetModelInfoResponse:
        return pb.GetModelInfoResponse()

    def Complete(self, request: Any, context: Any) -> pb.CompleteResponse:
        return pb.CompleteResponse()

    def Generate(self, request: Any, context: Any) -> Iterator[pb.GenerateResponse]:
        self.left -= 1
        while self.left < 0 and context.is_active():
            time.sleep(0.01)
        yield pb.GenerateResponse(round=pb.Round(tokens=[pb.Token(id=1)]))
        yield pb.GenerateResponse(summary=pb.Summary(new_tokens=1))
        self.sent += 1


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Also in the background of a shell, which has all that it starts there ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def orchestrator() -> Iterator[tuple[Orchestrator, str]]:
    served = Orchestrator(6)
    server = grpc.server(ThreadPoolExecutor(8))
    orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server(served, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield served, f"127.0.0.1:{port}"
    server.stop(None).wait(5)


def has_read_all(pid: int, address: str) -> bool:
    """Whether a process has nothing to read from a server's port, and does nothing."""
    port = f":{int(address.rpartition(':')[2]):04X}"
    tables = (Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6"))
    lines = [line.split() for table in tables for line in table.splitlines()]
    queues = [line[4] for line in lines if line[1].endswith(port) or line[2].endswith(port)]
    tasks = Path(f"/proc/{pid}/task").glob("*/stat")
    states = {task.read_text().rpartition(")")[2].split()[0] for task in tasks}
    return set(queues) == {"00000000:00000000"} and states == {"S"}


@pytest.mark.parametrize(
    "how", [["--texts", "40"], ["--texts", "40", "--rate", "1000"], ["--sweep", "--seconds", "1"]]
)
def test_a_bench_reports_the_texts_that_had_ended(
    orchestrator: tuple[Orchestrator, str], how: list[str]
) -> None:
    served, address = orchestrator
    if "--sweep" in how:
        served.left = 3  # a rate of one text and a rate of two, and the next one waits
    texts = served.left
    command = [sys.executable, "-m", "tandem.tools.cli", "bench", "-a", address, "--warm-up", "0"]
    run = subprocess.Popen(
        [*command, *how, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_until(lambda: served.left < 0 and served.sent == texts)
    wait_until(lambda: has_read_all(run.pid, address))
    run.send_signal(signal.SIGINT)
    said, told = run.communicate(timeout=_SECONDS)
    assert run.returncode == 130, told
    assert "interrupted: " in told
    found = json.loads(said)
    if "--sweep" in how:
        assert [level["rate"] for level in found["levels"]] == [1, 2]
    else:
        assert found["texts"] == len(found["timelines"]) == 6
        assert not found["errors"]
        assert "6 of 40 texts had ended" in told


def test_a_bench_without_a_text_has_nothing_to_report(
    orchestrator: tuple[Orchestrator, str],
) -> None:
    served, address = orchestrator
    served.left = 0
    command = [sys.executable, "-m", "tandem.tools.cli", "bench", "-a", address, "--json"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: served.left < 0)
    run.send_signal(signal.SIGINT)
    said, told = run.communicate(timeout=_SECONDS)
    assert run.returncode == 130
    assert not said
    assert told.strip() == "tandem: interrupted"


def test_a_load_reports_the_scenarios_that_had_ended(
    orchestrator: tuple[Orchestrator, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, address = orchestrator
    calls = Calls(
        (Call(0.0, 0.1, "OK"), Call(0.0, 0.2, "Internal")), {"OK": 1, "Internal": 1}, {}, 1
    )

    def run(campaign: Campaign, scenario: Scenario) -> Outcome:
        if scenario.name == "generate-open":
            raise KeyboardInterrupt
        return Outcome.of(scenario, calls)

    monkeypatch.setattr(Campaign, "run", run)
    monkeypatch.setattr("tandem.tools.load.ghz.tool.find", lambda root: "ghz")
    arguments = ["load", "-a", address, "--no-sweep", "--out", str(tmp_path)]
    ended = CliRunner().invoke(app, [*arguments, "generate-closed", "generate-open"])
    assert ended.exit_code == 130
    assert "interrupted: the report is of 1 loads" in ended.stderr
    (load,) = json.loads((tmp_path / "report.json").read_text())["loads"]
    assert load["name"] == "generate-closed"
    (tmp_path / "report.json").unlink()
    ended = CliRunner().invoke(app, [*arguments, "generate-open"])
    assert ended.exit_code == 130
    assert not (tmp_path / "report.json").exists()


def test_a_second_interrupt_ends_a_report_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), so_far(True):
        raise KeyboardInterrupt

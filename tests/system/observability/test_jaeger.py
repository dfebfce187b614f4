"""Where Jaeger is installed: it takes the spans of all three services and returns whole traces."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tests.support.processes.ports import free_ports
from tests.support.processes.services import Trio, generation, trio
from tests.support.repository import ROOT

NAME = "jaeger-all-in-one"
JAEGER = shutil.which(NAME, path=f"{ROOT / '.cache' / 'bin'}:{os.environ['PATH']}")
pytestmark = [
    pytest.mark.campaign(
        "a real Jaeger returns whole traces",
        "unit/telemetry; system/serving/test_lifecycle.py: one trace of three processes",
    ),
    pytest.mark.skipif(
        JAEGER is None,
        reason=f"no {NAME} on PATH or in .cache/bin; make observability-check builds it with Go",
    ),
]

REQUESTS = 20
SECONDS = 60
# Spans go out every five seconds otherwise.
PACE = {"OTEL_BSP_SCHEDULE_DELAY": "200", "OTEL_METRICS_EXPORTER": "none"}
PARENTS = {
    "round": "generate",
    "call.draft": "round",
    "draft": "call.draft",
    "draft.forward": "draft",
    "call.verify": "round",
    "verify": "call.verify",
    "verify.forward": "verify",
}
SERVICES = {"round": "orchestrator", "draft": "drafter", "verify": "target"}


class Jaeger:
    """Its query API, and where it takes spans."""

    def __init__(self, otlp: int, query: int) -> None:
        self.endpoint = f"http://127.0.0.1:{otlp}"
        self.source = f"jaeger:http://127.0.0.1:{query}"
        self._api = f"http://127.0.0.1:{query}/api"

    def get(self, path: str, **parameters: Any) -> Any:
        url = f"{self._api}/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as reply:
            return json.load(reply)["data"]

    def answers(self) -> bool:
        try:
            self.get("services")
        except (urllib.error.URLError, ConnectionError):
            return False
        return True

    def traces(self) -> list[Any]:
        """Of requests, not of passes."""
        found: list[Any] = self.get(
            "traces", service="orchestrator", operation="generate", limit=1000, lookback="1h"
        )
        return found


@contextmanager
def jaeger(folder: Path) -> Iterator[Jaeger]:
    """One of our own, in memory and on this machine alone."""
    otlp, query, *others = free_ports(7)
    places = ("otlp.http", "grpc-server", "http-server")
    command = [
        JAEGER or "",
        f"--collector.otlp.grpc.host-port=127.0.0.1:{otlp}",
        f"--query.http-server.host-port=127.0.0.1:{query}",
        f"--query.grpc-server.host-port=127.0.0.1:{others[3]}",
        f"--admin.http.host-port=127.0.0.1:{others[4]}",
        *(
            f"--collector.{name}.host-port=127.0.0.1:{port}"
            for name, port in zip(places, others[:3], strict=True)
        ),
    ]
    with (folder / "jaeger.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        served = Jaeger(otlp, query)
        wait(served.answers)
        yield served
    finally:
        process.terminate()
        process.wait()


def wait(until: Any) -> None:
    deadline = time.monotonic() + SECONDS
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def complete(services: Trio) -> list[pb.Summary]:
    with services.client() as stub:
        return [
            stub.Complete(
                pb.CompleteRequest(
                    generation=generation([1, 2], max_new_tokens=20, seed=seed, gamma=3)
                )
            ).summary
            for seed in range(REQUESTS)
        ]


def test_twenty_requests_are_twenty_whole_traces(
    tmp_path: Path, random_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, target = map(str, random_pair)
    with jaeger(tmp_path) as collector:
        for name, value in PACE.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        with trio(
            tmp_path, drafter={"MODEL": drafter}, target={"MODEL": target}, orchestrator={}
        ) as services:
            summaries = complete(services)
            assert [process.stop() for process in services.processes] == [0, 0, 0]
        wait(lambda: len(collector.traces()) >= REQUESTS)
        traces = collector.traces()
        reported = report(collector)
        assert {"drafter", "target", "orchestrator"} <= set(collector.get("services"))
    asked = [trace for trace in traces if len(trace["spans"]) > 1]
    assert len(asked) == REQUESTS
    counts = sorted(summary.rounds - 1 for summary in summaries)
    assert sorted(check(trace) for trace in asked) == counts
    assert (reported["requests"], reported["rounds"]) == (REQUESTS, sum(counts))
    assert sum(stage["share"] for stage in reported["stages"]) == pytest.approx(1.0, abs=1e-6)


def report(collector: Jaeger) -> Any:
    """What `tandem trace report` makes of what Jaeger gives back."""
    report = ("trace", "report", "--json", collector.source)
    command = [sys.executable, "-m", "tandem.tools.cli", *report]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def check(trace: Any) -> int:
    """Rounds of a trace whose spans hang together as they should."""
    spans = {span["spanID"]: span for span in trace["spans"]}
    for span in spans.values():
        parents = [one["spanID"] for one in span["references"] if one["refType"] == "CHILD_OF"]
        name, service = span["operationName"], trace["processes"][span["processID"]]["serviceName"]
        if name == "generate":
            assert not parents
            continue
        (parent,) = parents
        assert spans[parent]["operationName"] == PARENTS.get(name, spans[parent]["operationName"])
        assert service == SERVICES.get(name, service)
    names = [span["operationName"] for span in spans.values()]
    assert names.count("generate") == 1
    assert {"draft", "verify", "draft.forward", "verify.forward"} <= set(names)
    assert names.count("verify") == names.count("round")
    return names.count("round")

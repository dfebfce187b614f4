"""A collector that dies costs a log line, and costs no request anything."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import (
    trace_service_pb2,
    trace_service_pb2_grpc,
)

from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tests.support.processes.services import Trio, generation, trio

pytestmark = pytest.mark.campaign(
    "a collector that dies costs no request anything",
    "unit/telemetry: a dead collector is said once; faults/test_environment.py: a full queue",
)

SECONDS = 30
# So that many exports fail while the test looks on.
PACE = {"OTEL_BSP_SCHEDULE_DELAY": "100", "OTEL_METRICS_EXPORTER": "none"}
PACE |= {"OTEL_EXPORTER_OTLP_TIMEOUT": "1"}


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes spans, and notes of whom."""

    def __init__(self) -> None:
        self.heard: set[str] = set()
        self._lock = threading.Lock()

    def Export(self, request: Any, context: Any) -> Any:
        with self._lock:
            for resource in request.resource_spans:
                for one in resource.resource.attributes:
                    if one.key == "service.name":
                        self.heard.add(one.value.string_value)
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def serving(collector: Collector) -> Iterator[tuple[str, grpc.Server]]:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    add = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add(collector, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}", server
    finally:
        server.stop(None)


def complete(services: Trio, seed: int) -> list[int]:
    asked = generation([1, 2], max_new_tokens=20, seed=seed, gamma=3)
    with services.client() as stub:
        return list(stub.Complete(pb.CompleteRequest(generation=asked), timeout=30).token_ids)


def test_a_collector_that_dies_costs_a_line(
    tmp_path: Path, random_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = Collector()
    drafter, target = map(str, random_pair)
    with serving(collector) as (endpoint, server):
        for name, value in {**PACE, "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}.items():
            monkeypatch.setenv(name, value)
        with trio(
            tmp_path, drafter={"MODEL": drafter}, target={"MODEL": target}, orchestrator={}
        ) as services:
            deadline = time.monotonic() + SECONDS
            before = [complete(services, seed) for seed in range(4)]
            while collector.heard != {"drafter", "target", "orchestrator"}:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            server.stop(None).wait()
            after = []
            until = time.monotonic() + 5  # dozens of exports
            while time.monotonic() < until:
                after = [complete(services, seed) for seed in range(4)]
            assert after == before
            assert [process.stop() for process in services.processes] == [0, 0, 0]
    logs = sorted(tmp_path.glob("*.log"))
    assert len(logs) == 3
    for log in logs:
        lines = [json.loads(line) for line in log.read_text().splitlines() if line[:1] == "{"]
        told = [
            line
            for line in lines
            if line["level"] in ("warning", "error", "critical")
            and line["event"] != "not ready"  # at its start, as it waits for the others
        ]
        assert len(told) == 1, told
        assert told[0]["logger"].startswith("opentelemetry.")

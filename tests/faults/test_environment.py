"""What fails around the services: clocks that jump, a full disk, telemetry that goes nowhere, late
names. Texts go on."""

from __future__ import annotations

import asyncio
import itertools
import re
import socket
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from orchestrator.front.service import make_service
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.rpc.channel import connect
from tandem.rpc.server import RunningServer
from tandem.tools.local.process import ServiceProcess
from tests.support.processes.services import READY_SECONDS, is_serving
from tests.support.repository import ROOT
from tests.support.waiting import HANG_SECONDS
from tests.support.wire.fakes import FakeDrafter, FakeTarget, orchestrate, request, serve_fakes
from tests.support.wire.names import serve_names

EXPECTED = FakeTarget().text(20)
DAY_NS = 24 * 3600 * 10**9
# Stamps of spans and of metrics, which are times of day, and what is kept from start to start.
WALL_CLOCK = {
    "orchestrator/front/chat_template.py",  # templates may write the date
    "orchestrator/front/http/app.py",  # replies say when they were made
    "tandem/peers/text/record.py",
    "tandem/inference/choice/record.py",
    "tandem/rpc/security/certificates.py",  # they say themselves from when and until when they hold
    "tandem/telemetry/metrics/instruments.py",
    "tandem/telemetry/metrics/otlp.py",
    "tandem/telemetry/tracing/spans.py",
    "tandem/telemetry/tracing/steps.py",
}


async def test_texts_go_on_while_the_clock_jumps(monkeypatch: pytest.MonkeyPatch) -> None:
    jumps = itertools.cycle((DAY_NS, -DAY_NS, 0))
    now_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + next(jumps))
    monkeypatch.setattr(time, "time", lambda: (now_ns() + next(jumps)) / 1e9)
    waits: dict[str, Any] = {"verify_seconds": 5.0, "draft_seconds": 5.0, "idle_seconds": 5.0}
    async with orchestrate(FakeDrafter(), FakeTarget(), **waits) as stub:
        for _ in range(10):
            # Without a deadline of gRPC's, whose Python makes it of the time of day.
            async with asyncio.timeout(HANG_SECONDS):
                reply = await stub.Complete(request())
            assert list(reply.token_ids) == EXPECTED
            assert not reply.summary.drafter_lost
            assert reply.summary.stages.total_ns < DAY_NS


def test_nothing_is_waited_for_by_the_time_of_day() -> None:
    """Waits and ages go by clocks that never jump; whoever reads the other is named above."""
    found = {
        str(path.relative_to(ROOT))
        for folder in ("tandem", "orchestrator", "drafter_svc", "target_svc")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"\btime\.time(_ns)?\(|datetime\.(now|utcnow)\(", path.read_text())
        and not path.is_relative_to(ROOT / "tandem/tools/traces")
        and not path.is_relative_to(ROOT / "tandem/tools/load")
    }
    assert found == WALL_CLOCK


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full to be full")
async def test_a_full_disk_and_a_full_queue_of_telemetry_fail_no_text(tmp_path: Path) -> None:
    """Traces go to a disk without room, metrics to somebody who accepts and never answers."""
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        async with serve_fakes(FakeDrafter(), FakeTarget()) as settings:
            own = {
                "LISTEN": "127.0.0.1:0",
                "LOG_FORMAT": "json",
                "TRACE_FILE": "/dev/full",
                "DRAFTERS": settings.drafters[0],
                "TARGETS": settings.targets[0],
            }
            environment = {f"TANDEM_ORCHESTRATOR_{name}": value for name, value in own.items()}
            environment |= {
                "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{mute.getsockname()[1]}",
                "OTEL_METRICS_EXPORTER": "otlp",
                "OTEL_METRIC_EXPORT_INTERVAL": "50",
                "OTEL_METRIC_EXPORT_TIMEOUT": "200",
                "OTEL_BSP_MAX_QUEUE_SIZE": "4",
                "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "2",
                "OTEL_BSP_SCHEDULE_DELAY": "20",
            }
            log = tmp_path / "orchestrator.log"
            process = ServiceProcess(
                "orchestrator", "orchestrator", "127.0.0.1", environment, log, root=ROOT
            )
            try:
                await asyncio.to_thread(_wait, process)
                async with connect(process.address) as channel:
                    stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
                    texts = (stub.Complete(request(), timeout=HANG_SECONDS) for _ in range(50))
                    for reply in await asyncio.gather(*texts):
                        assert list(reply.token_ids) == EXPECTED
            finally:
                code = await asyncio.to_thread(process.stop, 30)
            assert code == 0, process.last_lines()
            assert "No space left" in log.read_text()


def _wait(process: ServiceProcess) -> None:
    deadline = time.monotonic() + READY_SECONDS
    name = "tandem.orchestrator.v1.OrchestratorService"
    while process.port is None or not is_serving(process.address, name):
        assert time.monotonic() < deadline, process.last_lines()
        time.sleep(0.05)


async def test_names_that_are_answered_late_hold_no_text_up() -> None:
    async with AsyncExitStack() as stack:
        names = await stack.enter_async_context(serve_names())
        settings = await stack.enter_async_context(serve_fakes(FakeDrafter(), FakeTarget()))
        host, _, port = settings.targets[0].rpartition(":")
        behind = f"dns://127.0.0.1:{names.port}/targets.test:{port}"
        changes: dict[str, Any] = {"targets": (behind,), "resolve_seconds": 0.05}
        changes["peer_plaintext"] = "allow"  # its name is answered by this machine
        server = RunningServer("127.0.0.1:0", make_service(settings.model_copy(update=changes)))
        names.records["targets.test"] = [host]
        names.silent = True
        await server.start()
        stack.push_async_callback(server.stop, 0.2)
        channel = await stack.enter_async_context(connect(f"127.0.0.1:{server.port}"))
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        async with asyncio.timeout(HANG_SECONDS):
            while not names.asked:  # noqa: ASYNC110  # its questions are no event of ours
                await asyncio.sleep(0.02)
            # No target is known yet: texts are refused, and at once.
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Complete(request())
            assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
            names.silent = False
            await server.ready()
            names.silent = True
            for _ in range(10):
                # A text does not wait for names: it would take longer.
                reply = await stub.Complete(request(), timeout=5)
                assert list(reply.token_ids) == EXPECTED

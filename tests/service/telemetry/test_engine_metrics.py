"""The metrics of all three services in a run, compared with docs/telemetry.md and the work done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.metrics_core import Metric as Family

from drafter_svc.servicer import make_service as make_drafter
from drafter_svc.settings import DrafterSettings
from orchestrator.front.service import make_service as make_orchestrator
from orchestrator.settings import OrchestratorSettings
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.rpc.server import Service
from tandem.target.v1 import target_pb2_grpc
from target_svc.servicer import make_service as make_target
from target_svc.settings import TargetSettings
from tests.service.conftest import address_of, connect, start
from tests.service.requests.test_generate import generation
from tests.service.streams.test_engine_failures import OPEN, VERIFY
from tests.support.repository import ROOT
from tests.support.waiting import HANG_SECONDS
from tests.support.wire.scrape import ANY_PORT, Scraped, families, tracing
from tests.support.wire.talk import Talk

DOCS = ROOT / "docs" / "telemetry.md"
STAGES = "tandem_stage_duration_seconds_count"
# A histogram's own label; the others are the metric's.
BOUND = "le"


@dataclass
class Running:
    """Three services and where their metrics are."""

    orchestrator: Any
    ports: dict[str, int]

    async def families(self) -> dict[str, list[Family]]:
        return {role: await families(port) for role, port in self.ports.items()}

    async def scrape(self, role: str) -> Scraped:
        return Scraped(await families(self.ports[role]))


@pytest.fixture
async def running(random_pair: tuple[Path, Path]) -> AsyncIterator[Running]:
    drafter_model, target_model = random_pair
    async with AsyncExitStack() as stack:
        services: dict[str, Service] = {
            "drafter": make_drafter(
                DrafterSettings(model=str(drafter_model), metrics_listen=ANY_PORT)
            ),
            "target": make_target(TargetSettings(model=str(target_model), metrics_listen=ANY_PORT)),
        }
        servers = {role: await start(stack, service) for role, service in services.items()}
        settings = OrchestratorSettings(
            drafters=(address_of(servers["drafter"]),),
            targets=(address_of(servers["target"]),),
            metrics_listen=ANY_PORT,
            gamma=4,
        )
        services["orchestrator"] = make_orchestrator(settings)
        server = await start(stack, services["orchestrator"])
        await server.ready()
        channel = await connect(stack, address_of(server))
        ports = {
            role: service.metering.port if service.metering else 0
            for role, service in services.items()
        }
        yield Running(orchestrator_pb2_grpc.OrchestratorServiceStub(channel), ports)


def documented() -> dict[str, tuple[str, str, str, set[str], set[str]]]:
    """Of each metric of the docs: OpenTelemetry's name, kind, unit, labels and services."""
    rows = {}
    for line in DOCS.read_text().splitlines():
        cells = [cell.strip().replace("`", "") for cell in line.split("|")[1:-1]]
        if len(cells) == 7 and cells[2] in ("counter", "gauge", "histogram"):
            name, series, kind, unit, labels, roles, _ = cells
            own = {label for label in labels.split(", ") if label}
            rows[series] = name, kind, unit, own, set(roles.split(", "))
    return rows


def emitted(read: dict[str, list[Family]]) -> dict[str, tuple[str, set[str], set[str]]]:
    """Of each metric with a value: kind, labels and services. A histogram has one when something
    was observed; a counter may well be 0."""
    found: dict[str, tuple[str, set[str], set[str]]] = {}
    for role, all_families in read.items():
        for family in all_families:
            counts = [s.value for s in family.samples if s.name.endswith("_count")]
            if family.type == "histogram" and not any(counts):
                continue
            series = f"{family.name}_total" if family.type == "counter" else family.name
            for sample in family.samples:
                _, labels, roles = found.setdefault(series, (family.type, set(), set()))
                # One with an empty value is not there.
                labels.update(name for name in sample.labels if name != BOUND)
                roles.add(role)
    return found


async def test_the_docs_list_what_is_emitted_and_nothing_else(running: Running) -> None:
    await running.orchestrator.Complete(
        pb.CompleteRequest(generation=generation()), timeout=HANG_SECONDS
    )
    expected = {
        series: (kind, {label.replace(".", "_") for label in labels}, roles)
        for series, (_, kind, _, labels, roles) in documented().items()
    }
    seen = emitted(await running.families())
    # The event loops' lag is looked at ten times a second.
    ends = time.monotonic() + HANG_SECONDS
    while seen != expected and time.monotonic() < ends:
        await asyncio.sleep(0.05)
        seen = emitted(await running.families())
    assert seen == expected


def test_the_docs_translate_names_as_prometheus_does() -> None:
    rows = documented()
    assert len(rows) > 20
    for series, (name, kind, unit, _, _) in rows.items():
        ending = {"s": "_seconds", "By": "_bytes"}.get(unit, "")
        total = "_total" if kind == "counter" else ""
        assert series == f"{name.replace('.', '_')}{ending}{total}"


async def test_every_step_is_booked_by_its_stages(running: Running) -> None:
    summaries = []
    for seed in range(3):
        asked = generation(sampling={"seed": seed})
        call = running.orchestrator.Complete(
            pb.CompleteRequest(generation=asked), timeout=HANG_SECONDS
        )
        summaries.append((await call).summary)
    drafter, target = await running.scrape("drafter"), await running.scrape("target")
    rounds = sum(summary.rounds - 1 for summary in summaries)
    drafts = sum(gamma > 0 for summary in summaries for gamma in summary.gammas)
    for stage in ("queue", "gather", "forward", "accept"):
        assert target.value(STAGES, role="target", step="verify", stage=stage) == rounds
        for scraped in (drafter, target):
            assert scraped.value(STAGES, step="prefill", stage=stage) == 3
    for stage in ("queue", "gather", "forward", "draw"):
        assert drafter.value(STAGES, role="drafter", step="draft", stage=stage) == drafts
    spent = target.value("tandem_stage_duration_seconds_sum", step="verify", stage="forward")
    reported = sum(summary.stages.verify_forward_busy_ns for summary in summaries)
    assert spent == pytest.approx(reported / 1e9)
    # A target makes a pass a step, all of one sequence here.
    assert target.value("tandem_batch_size_sum") == target.value("tandem_batch_size_count")
    assert target.value("tandem_batch_size_count") == rounds + 3


async def test_exemplars_of_every_service_lead_to_the_trace(running: Running) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    metadata = (("traceparent", f"00-{trace_id}-b7ad6b7169203331-01"),)
    asked = pb.CompleteRequest(generation=generation())
    with tracing():
        await running.orchestrator.Complete(asked, metadata=metadata, timeout=HANG_SECONDS)
    for role in running.ports:
        scraped = await running.scrape(role)
        named = scraped.named("tandem_stage_duration_seconds_bucket", role=role)
        found = {s.exemplar.labels["trace_id"] for s in named if s.exemplar is not None}
        assert found == {trace_id}, role


async def test_places_and_memory_are_read_when_asked_for(random_pair: tuple[Path, Path]) -> None:
    settings = TargetSettings(
        model=str(random_pair[1]),
        max_sequences=1,
        cache_tokens=512,
        max_length=512,
        admission_seconds=30,
        metrics_listen=ANY_PORT,
    )
    async with AsyncExitStack() as stack:
        service = make_target(settings)
        server = await start(stack, service)
        await server.ready()
        assert service.metering is not None
        port = service.metering.port
        stub: Any = target_pb2_grpc.TargetServiceStub(await connect(stack, address_of(server)))

        async def gauges() -> tuple[float, float, float, float]:
            scraped = Scraped(await families(port))
            return (
                scraped.value("tandem_sequences_open"),
                scraped.value("tandem_queue_depth"),
                scraped.value("tandem_kv_positions", state="used"),
                scraped.value("tandem_kv_positions", state="free"),
            )

        assert await gauges() == (0, 0, 0, 512)
        first, second = Talk(stub.Verify()), Talk(stub.Verify())
        assert (await first.ask(OPEN)).HasField("opened")
        assert await gauges() == (1, 0, 52, 460)
        await second.write(OPEN)
        async with asyncio.timeout(HANG_SECONDS):
            while await gauges() != (1, 1, 52, 460):  # noqa: ASYNC110  # seen from outside
                await asyncio.sleep(0.02)
            first.cancel()
            assert (await second.read()).HasField("opened")
        assert await gauges() == (1, 0, 52, 460)
        second.cancel()


async def test_a_failed_step_books_no_stage(
    random_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = TargetSettings(model=str(random_pair[1]), metrics_listen=ANY_PORT)
    async with AsyncExitStack() as stack:
        service = make_target(settings)
        server = await start(stack, service)
        await server.ready()
        assert service.metering is not None
        stub: Any = target_pb2_grpc.TargetServiceStub(await connect(stack, address_of(server)))
        talk = Talk(stub.Verify())
        assert (await talk.ask(OPEN)).HasField("opened")

        def fail(*arguments: Any) -> None:
            raise RuntimeError("out of memory")

        monkeypatch.setattr("tandem.engine.stepper.decide", fail)
        await talk.write(VERIFY)
        await talk.end()
        scraped = Scraped(await families(service.metering.port))
        assert scraped.value(STAGES, step="verify") == 0
        assert scraped.value(STAGES, step="prefill", stage="forward") == 1

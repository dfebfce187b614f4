"""Reads metrics as Prometheus would; and an orchestrator over fakes with a metrics endpoint."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from orchestrator.front.service import make_service
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.rpc.channel import connect
from tandem.rpc.server import RunningServer
from tandem.telemetry.tracing import spans
from tandem.telemetry.tracing.export import SpanWriter
from tests.support.waiting import HANG_SECONDS
from tests.support.wire.fakes import FakeDrafter, FakeTarget, serve_fakes

ANY_PORT = "127.0.0.1:0"


@contextmanager
def tracing() -> Iterator[None]:
    """Record spans, and discard them."""
    spans.install(SpanWriter(TracerProvider(), SimpleSpanProcessor(InMemorySpanExporter())))
    try:
        yield
    finally:
        spans.install(None)


def fetch(port: int, accept: str = "application/openmetrics-text") -> str:
    """The endpoint's answer."""
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(asked, timeout=HANG_SECONDS) as reply:
        text: str = reply.read().decode()
    return text


async def families(port: int) -> list[Family]:
    """The endpoint's metric families, parsed as Prometheus would."""
    text = await asyncio.to_thread(fetch, port)
    return list(text_string_to_metric_families(text))  # type: ignore[no-untyped-call]


class Scraped:
    """Samples of one scrape."""

    def __init__(self, read: list[Family]) -> None:
        self.samples: list[Sample] = [sample for family in read for sample in family.samples]

    def value(self, name: str, **labels: str) -> float:
        """Sum of the samples that have a name and these labels."""
        return sum(sample.value for sample in self.named(name, **labels))

    def named(self, name: str, **labels: str) -> list[Sample]:
        """The samples that have a name and these labels."""
        return [
            sample
            for sample in self.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]


class Metered:
    """An orchestrator with a metrics endpoint.

    Attributes:
        stub: for its public calls.
        port: of its metrics.
    """

    def __init__(self, stub: Any, port: int) -> None:
        self.stub = stub
        self.port = port

    async def scrape(self) -> Scraped:
        return Scraped(await families(self.port))

    async def ends(self, count: int) -> dict[tuple[str, str], float]:
        """Requests by status and finish reason, once `count` of them have ended."""
        async with asyncio.timeout(HANG_SECONDS):
            while True:
                scraped = await self.scrape()
                samples = scraped.named("tandem_requests_total")
                if sum(sample.value for sample in samples) >= count:
                    break
                await asyncio.sleep(0.02)
        return {
            (sample.labels["status"], sample.labels["finish_reason"]): sample.value
            for sample in samples
        }


@asynccontextmanager
async def metered(
    *fakes: FakeDrafter | FakeTarget, ready: bool = True, **settings: Any
) -> AsyncIterator[Metered]:
    """An orchestrator over fakes, with its metrics on a free port."""
    async with serve_fakes(*fakes, metrics_listen=ANY_PORT, **settings) as chosen:
        service = make_service(chosen)
        server = RunningServer("127.0.0.1:0", service)
        await server.start()
        try:
            if ready:
                await server.ready()
            assert service.metering is not None
            async with connect(f"127.0.0.1:{server.port}") as channel:
                stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
                yield Metered(stub, service.metering.port)
        finally:
            await server.stop(1.0)

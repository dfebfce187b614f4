"""What a caller's trace context decides: the spans' trace, and whether any are written."""

from __future__ import annotations

import asyncio

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased

from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.telemetry.tracing import spans
from tandem.telemetry.tracing.export import SpanWriter
from tests.service.conftest import Stack
from tests.service.requests.test_generate import generation
from tests.support.waiting import until
from tests.support.wire.spans import METADATA, exporter, finished, processor_of

__all__ = ["exporter"]  # a fixture of all files of spans


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00-zz-11-01",
        "01",
        "00--" + "0" * 30 + "1-" + "0" * 15 + "1-01",
        METADATA[0][1][:40],
        "00-" + 60 * "0",
    ],
)
async def test_a_malformed_caller_makes_a_new_trace(
    stack: Stack, exporter: InMemorySpanExporter, header: str
) -> None:
    await stack.orchestrator.Complete(
        pb.CompleteRequest(generation=generation()), metadata=(("traceparent", header),)
    )
    await until(
        lambda: (
            {"generate", "draft", "verify"} <= {span.name for span in exporter.get_finished_spans()}
        )
    )
    found = exporter.get_finished_spans()
    roots = [span for span in found if span.parent is None and span.name != "pass"]
    assert [span.name for span in roots] == ["generate"]


async def test_the_sampler_decides_at_the_head(stack: Stack) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=ParentBased(ALWAYS_OFF))
    spans.install(SpanWriter(provider, processor_of(exporter)))
    await stack.orchestrator.Complete(pb.CompleteRequest(generation=generation()))
    await asyncio.sleep(0.2)
    assert not exporter.get_finished_spans()
    await stack.orchestrator.Complete(
        pb.CompleteRequest(generation=generation()), metadata=METADATA
    )
    await finished(exporter)
    spans.install(None)


async def test_unsampled_requests_record_nothing(
    stack: Stack, exporter: InMemorySpanExporter
) -> None:
    unsampled = (("traceparent", METADATA[0][1][:-2] + "00"),)
    await stack.orchestrator.Complete(
        pb.CompleteRequest(generation=generation()), metadata=unsampled
    )
    await asyncio.sleep(0.2)
    assert not exporter.get_finished_spans()

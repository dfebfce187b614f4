"""The expected spans of a text with their parents, and the spans that were written."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tandem.telemetry.stages import STEP_STAGES, span_of
from tandem.telemetry.tracing import spans
from tandem.telemetry.tracing.export import ReadableExporter, SpanWriter
from tests.support.waiting import HANG_SECONDS

TRACE_ID, CALLER = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
METADATA = (("traceparent", f"00-{TRACE_ID:032x}-{CALLER:016x}-01"),)

SURE = {
    ("generate", "caller"),
    ("tokenize", "generate"),
    ("open", "generate"),
    ("call.prefill", "open"),
    ("call.prefill", "generate"),  # the drafter's, beside the target's
    ("prefill", "call.prefill"),
    ("prefill.forward", "prefill"),
    ("round", "generate"),
    ("call.draft", "round"),
    ("draft", "call.draft"),
    ("draft.forward", "draft"),
    ("call.verify", "round"),
    ("verify", "call.verify"),
    ("verify.forward", "verify"),
    ("close", "generate"),
}
# Stages that are too short have no span of their own.
STEPS = ("prefill", "draft", "verify")
STAGES = {span_of(step, stage) for step in STEPS for stage in STEP_STAGES}
BRIEF = {
    ("detokenize", "round"),
    ("detokenize", "generate"),  # the token of the prefill
    ("send", "generate"),
    ("wait", "generate"),
}
PARENTS = SURE | BRIEF | {(stage, stage.split(".")[0]) for stage in STAGES}


def processor_of(exporter: InMemorySpanExporter) -> SimpleSpanProcessor:
    """A processor that writes spans at once."""
    return SimpleSpanProcessor(ReadableExporter(exporter, Resource({})))


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    """The exporter that gets all spans of this process."""
    exporter = InMemorySpanExporter()
    spans.install(SpanWriter(TracerProvider(), processor_of(exporter)))
    yield exporter
    spans.install(None)


async def finished(exporter: InMemorySpanExporter, count: int = 1) -> list[ReadableSpan]:
    """All spans of our trace, once the last ones have been written: spans lag behind replies."""
    found: list[ReadableSpan] = []
    async with asyncio.timeout(HANG_SECONDS):
        while True:
            before, found = len(found), list(exporter.get_finished_spans())
            if len(found) == before >= count and any(span.name == "generate" for span in found):
                break
            await asyncio.sleep(0.05)
    found = [span for span in found if span.name != "pass"]
    assert {span.context.trace_id for span in found} == {TRACE_ID}
    return found


def passes(exporter: InMemorySpanExporter) -> list[ReadableSpan]:
    """The spans of passes, which are roots of their own traces."""
    return [span for span in exporter.get_finished_spans() if span.name == "pass"]


def edges(found: list[ReadableSpan]) -> Counter[tuple[str, str]]:
    names = {span.context.span_id: span.name for span in found} | {CALLER: "caller"}
    return Counter(
        (span.name, names[span.parent.span_id]) for span in found if span.parent is not None
    )

"""The contract of the spans: names, parents and attributes, however a request ends."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tests.service.conftest import Stack
from tests.service.fakes import FakeDrafter, FakeTarget, orchestrate, request
from tests.service.test_generate import generation

TRACE_ID, CALLER = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
METADATA = (("traceparent", f"00-{TRACE_ID:032x}-{CALLER:016x}-01"),)

PARENTS = {
    ("generate", "caller"),
    ("tokenize", "generate"),
    ("open", "generate"),
    ("prefill", "open"),
    ("prefill", "generate"),  # the drafter's, beside the target's
    ("prefill.queue", "prefill"),
    ("prefill.forward", "prefill"),
    ("round", "generate"),
    ("draft", "round"),
    ("draft.queue", "draft"),
    ("draft.forward", "draft"),
    ("verify", "round"),
    ("verify.queue", "verify"),
    ("verify.forward", "verify"),
    ("verify.accept", "verify"),
    ("detokenize", "round"),
    ("detokenize", "generate"),  # the token of the prefill
}
ATTRIBUTES = {
    "generate": {
        "tandem.request_id",
        "tandem.verifier",
        "tandem.gamma",
        "tandem.accepted",
        "gen_ai.operation.name",
        "gen_ai.provider.name",
        "gen_ai.request.model",
        "gen_ai.request.max_tokens",
        "gen_ai.request.temperature",
        "gen_ai.usage.input_tokens",
        "gen_ai.usage.output_tokens",
        "gen_ai.response.finish_reasons",
    },
    "round": {"tandem.round", "tandem.gamma", "tandem.accepted", "tandem.verifier"},
    "draft": {
        "tandem.request_id",
        "tandem.round",
        "tandem.gamma",
        "tandem.batch_size",
        "tandem.draft_bytes",
    },
    "verify": {
        "tandem.request_id",
        "tandem.round",
        "tandem.gamma",
        "tandem.accepted",
        "tandem.verifier",
        "tandem.batch_size",
    },
    "prefill": {"tandem.request_id", "tandem.prompt_tokens"},
}


@pytest.fixture(scope="module")
def provider() -> TracerProvider:
    provider = TracerProvider()
    trace.set_tracer_provider(provider)
    return provider


@pytest.fixture
def exporter(provider: TracerProvider) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield exporter
    exporter.shutdown()


async def finished(exporter: InMemorySpanExporter, count: int = 1) -> list[ReadableSpan]:
    """All spans of our trace, once the services' last ones are there: they lag their replies."""
    spans: list[ReadableSpan] = []
    for _ in range(100):
        before, spans = len(spans), list(exporter.get_finished_spans())
        if len(spans) == before >= count and any(span.name == "generate" for span in spans):
            break
        await asyncio.sleep(0.05)
    assert {span.context.trace_id for span in spans} == {TRACE_ID}
    return spans


def edges(spans: list[ReadableSpan]) -> Counter[tuple[str, str]]:
    names = {span.context.span_id: span.name for span in spans} | {CALLER: "caller"}
    return Counter(
        (span.name, names[span.parent.span_id]) for span in spans if span.parent is not None
    )


async def test_success(stack: Stack, exporter: InMemorySpanExporter) -> None:
    reply = await stack.orchestrator.Complete(
        pb.CompleteRequest(generation=generation()), metadata=METADATA
    )
    spans = await finished(exporter)
    counted = edges(spans)
    assert set(counted) == PARENTS
    rounds = reply.summary.rounds - 1
    drafted = sum(gamma > 0 for gamma in reply.summary.gammas)
    assert counted["round", "generate"] == counted["verify", "round"] == rounds
    assert counted["draft", "round"] == drafted
    assert counted["prefill", "open"] == counted["prefill", "generate"] == 1
    for span in spans:
        assert span.status.status_code == StatusCode.UNSET
        if span.name in ATTRIBUTES:
            assert set(span.attributes or ()) == ATTRIBUTES[span.name], span.name


async def test_children_lie_within_their_parents(
    stack: Stack, exporter: InMemorySpanExporter
) -> None:
    await stack.orchestrator.Complete(
        pb.CompleteRequest(generation=generation()), metadata=METADATA
    )
    spans = await finished(exporter)
    by_id = {span.context.span_id: span for span in spans}
    for span in spans:
        parent = by_id.get(span.parent.span_id) if span.parent else None
        if parent is not None:
            assert (parent.start_time or 0) <= (span.start_time or 0)
            assert (span.end_time or 0) <= (parent.end_time or 0), span.name


async def test_a_cancel(stack: Stack, exporter: InMemorySpanExporter) -> None:
    call = stack.orchestrator.Generate(
        pb.GenerateRequest(generation=generation(stopping={"max_new_tokens": 400})),
        metadata=METADATA,
    )
    for _ in range(3):
        await call.read()
    call.cancel()
    spans = await finished(exporter, count=10)
    assert set(edges(spans)) <= PARENTS
    (root,) = [span for span in spans if span.name == "generate"]
    assert root.status.status_code == StatusCode.ERROR
    assert (root.attributes or {})["error.type"] == "CancelledError"


async def test_an_error(stack: Stack, exporter: InMemorySpanExporter) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await stack.orchestrator.Complete(
            pb.CompleteRequest(generation=generation(prompt_token_ids=[9])), metadata=METADATA
        )
    spans = await finished(exporter)
    assert set(edges(spans)) <= {("generate", "caller"), ("tokenize", "generate")}
    (root,) = [span for span in spans if span.name == "generate"]
    assert root.status.status_code == StatusCode.ERROR
    assert (root.attributes or {})["error.type"] == "InvalidRequest"
    assert "prompt_token_ids" in str(root.status.description)


async def test_a_target_that_fails_within_the_text(exporter: InMemorySpanExporter) -> None:
    """All the orchestrator's own spans: those of the fakes' side are not written."""
    target = FakeTarget()

    async def fail(round_: int | None, context: Any) -> None:
        if round_ == 2:
            await context.abort(grpc.StatusCode.INTERNAL, "out of memory")

    target.interfere = fail
    async with orchestrate(FakeDrafter(), target) as stub:
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Complete(request(), metadata=METADATA)
    spans = await finished(exporter)
    assert edges(spans) == {
        ("generate", "caller"): 1,
        ("tokenize", "generate"): 1,
        ("open", "generate"): 1,
        ("detokenize", "generate"): 1,
        ("round", "generate"): 2,
        ("detokenize", "round"): 1,
    }
    failed = [span for span in spans if span.status.status_code == StatusCode.ERROR]
    assert [span.name for span in failed] == ["round", "generate"]
    for span in failed:
        assert (span.attributes or {})["error.type"] == "PeerFailure"
        assert span.status.description == "the target failed (INTERNAL); the log has the details"
    assert (failed[0].attributes or {})["tandem.round"] == 2


async def test_unsampled_requests_record_nothing(
    stack: Stack, exporter: InMemorySpanExporter
) -> None:
    unsampled = (("traceparent", METADATA[0][1][:-2] + "00"),)
    await stack.orchestrator.Complete(
        pb.CompleteRequest(generation=generation()), metadata=unsampled
    )
    await asyncio.sleep(0.2)
    assert not exporter.get_finished_spans()

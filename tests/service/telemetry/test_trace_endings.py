"""The spans of requests that do not complete: abandoned, refused, failed."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tests.service.conftest import Stack
from tests.service.requests.test_generate import generation
from tests.support.wire.fakes import FakeDrafter, FakeTarget, orchestrate, request
from tests.support.wire.spans import (
    BRIEF,
    METADATA,
    PARENTS,
    edges,
    exporter,
    finished,
)

__all__ = ["exporter"]  # a fixture of all files of spans


async def test_a_cancel(stack: Stack, exporter: InMemorySpanExporter) -> None:
    call = stack.orchestrator.Generate(
        pb.GenerateRequest(generation=generation(stopping={"max_new_tokens": 400})),
        metadata=METADATA,
    )
    for _ in range(3):
        await call.read()
    call.cancel()
    found = await finished(exporter, count=10)
    assert set(edges(found)) <= PARENTS
    (root,) = [span for span in found if span.name == "generate"]
    assert (root.attributes or {})["tandem.cancelled"] is True
    # What its caller gave up has not failed.
    assert {span.status.status_code for span in found} == {StatusCode.UNSET}


async def test_an_error(stack: Stack, exporter: InMemorySpanExporter) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await stack.orchestrator.Complete(
            pb.CompleteRequest(generation=generation(prompt_token_ids=[9])), metadata=METADATA
        )
    found = await finished(exporter)
    assert set(edges(found)) <= {("generate", "caller"), ("tokenize", "generate")}
    (root,) = [span for span in found if span.name == "generate"]
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
    found = await finished(exporter)
    counted = {edge: count for edge, count in edges(found).items() if edge not in BRIEF}
    assert counted == {
        ("generate", "caller"): 1,
        ("tokenize", "generate"): 1,
        ("open", "generate"): 1,
        ("call.prefill", "open"): 1,
        ("call.prefill", "generate"): 1,
        ("round", "generate"): 2,
        ("call.draft", "round"): 2,
        ("call.verify", "round"): 2,
    }
    failed = [span for span in found if span.status.status_code == StatusCode.ERROR]
    assert [span.name for span in failed] == ["call.verify", "round", "generate"]
    for span in failed:
        assert (span.attributes or {})["error.type"] == "PeerFailure"
        assert span.status.description == "the target failed (INTERNAL); the log has the details"
    assert (failed[1].attributes or {})["tandem.round"] == 2

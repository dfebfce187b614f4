"""Telemetry that raises fails no text, and leaks none."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from orchestrator.text.codec import TextCodec
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.peers.text.metrics import RequestMetrics
from tandem.telemetry.tracing import spans
from tests.support.wire.fakes import FakeDrafter, FakeTarget, orchestrate, request
from tests.support.wire.spans import METADATA, exporter

__all__ = ["exporter"]  # a fixture of all files of spans


def broken(*args: Any, **named: Any) -> Any:
    raise RuntimeError("as a library does")


@pytest.mark.parametrize("call", ["wants", "write"])
async def test_a_recorder_that_raises(
    call: str, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans._recorder, call, broken)
    await a_text_completes()


async def test_metadata_that_cannot_be_read(
    exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans._PROPAGATOR, "extract", broken)
    await a_text_completes()


async def test_tokens_that_cannot_be_spelled(
    exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TextCodec, "spell", broken)
    await a_text_completes(trace_text=True)


@pytest.mark.parametrize("call", ["begin", "lose_drafter", "prefill", "round", "end"])
async def test_metrics_that_raise(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestMetrics, call, broken)
    drafter = FakeDrafter()

    async def lost(round_: int | None, context: Any) -> None:
        if round_ is not None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "lost")

    if call == "lose_drafter":
        drafter.interfere = lost
    await a_text_completes(drafter, metrics_listen="127.0.0.1:0")


async def a_text_completes(drafter: FakeDrafter | None = None, **settings: Any) -> None:
    async with orchestrate(drafter or FakeDrafter(), FakeTarget(), **settings) as stub:
        reply = await stub.Complete(request(), metadata=METADATA)
        assert list(reply.token_ids) == FakeTarget().text(20)
        info = await stub.GetModelInfo(pb.GetModelInfoRequest())
        assert info.active_requests == 0

"""The contract of the spans of a text: names, parents, attributes, times, links."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections import Counter
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from tokenizers import Tokenizer, models

from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tests.service.conftest import Stack
from tests.service.requests.test_generate import generation
from tests.support.repository import ROOT
from tests.support.wire.fakes import FakeDrafter, FakeTarget, orchestrate, request
from tests.support.wire.spans import (
    BRIEF,
    METADATA,
    PARENTS,
    STAGES,
    STEPS,
    SURE,
    TRACE_ID,
    edges,
    exporter,
    finished,
    passes,
)

__all__ = ["exporter"]  # a fixture of all files of spans

DOCUMENT = ROOT / "docs" / "telemetry.md"
CALL = {"rpc.system.name", "rpc.method", "server.address", "server.port"}
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
        "gen_ai.usage.cache_read.input_tokens",
        "tandem.drafter_cached_tokens",
        "tandem.drafter_weights_version",
        "gen_ai.response.finish_reasons",
    },
    "round": {
        "tandem.round",
        "tandem.gamma",
        "tandem.depth",
        "tandem.nodes",
        "tandem.place",
        "tandem.accepted",
        "tandem.bonus",
        "tandem.verifier",
    },
    "draft": {
        "tandem.request_id",
        "tandem.round",
        "tandem.gamma",
        "tandem.depth",
        "tandem.nodes",
        "tandem.probes",
        "tandem.batch_size",
        "tandem.draft_bytes",
    },
    "verify": {
        "tandem.request_id",
        "tandem.round",
        "tandem.depth",
        "tandem.nodes",
        "tandem.probes",
        "tandem.place",
        "tandem.accepted",
        "tandem.verifier",
        "tandem.batch_size",
    },
    "prefill": {
        "tandem.request_id",
        "tandem.prompt_tokens",
        "tandem.cached_tokens",
        "tandem.batch_size",
    },
    "call.prefill": CALL,
    "call.draft": CALL,
    "call.verify": CALL,
    "pass": {"tandem.batch_size", "tandem.tokens"},
}
KINDS = {"generate": SpanKind.SERVER} | {
    name: kind
    for step in STEPS
    for name, kind in ((step, SpanKind.SERVER), (f"call.{step}", SpanKind.CLIENT))
}


def assert_children_within_parents(found: list[ReadableSpan]) -> None:
    by_id = {span.context.span_id: span for span in found}
    for span in found:
        parent = by_id.get(span.parent.span_id) if span.parent else None
        if parent is not None:
            assert (parent.start_time or 0) <= (span.start_time or 0)
            assert (span.end_time or 0) <= (parent.end_time or 0), span.name


async def test_success(stack: Stack, exporter: InMemorySpanExporter) -> None:
    reply = await stack.orchestrator.Complete(
        pb.CompleteRequest(generation=generation()), metadata=METADATA
    )
    found = await finished(exporter)
    counted = edges(found)
    assert SURE <= set(counted) <= PARENTS
    rounds = reply.summary.rounds - 1
    drafted = sum(gamma > 0 for gamma in reply.summary.gammas)
    assert counted["round", "generate"] == counted["verify", "call.verify"] == rounds
    assert counted["verify.forward", "verify"] == rounds
    assert counted["draft", "call.draft"] == counted["call.draft", "round"] == drafted
    assert counted["draft.forward", "draft"] == sum(reply.summary.gammas)
    assert counted["call.prefill", "open"] == counted["call.prefill", "generate"] == 1
    for span in [*found, *passes(exporter)]:
        assert span.status.status_code == StatusCode.UNSET
        assert span.kind == KINDS.get(span.name, SpanKind.INTERNAL), span.name
        if span.name in ATTRIBUTES:
            assert set(span.attributes or ()) == ATTRIBUTES[span.name], span.name


async def test_a_round_of_a_run_has_its_spans_from_its_verdict(
    stack: Stack, exporter: InMemorySpanExporter
) -> None:
    """The same as another, and its passes belong to the trace."""
    plain = generation(speculation={"gamma": 0})
    reply = await stack.orchestrator.Complete(
        pb.CompleteRequest(generation=plain), metadata=METADATA
    )
    found = await finished(exporter)
    counted, rounds = edges(found), reply.summary.rounds - 1
    assert counted["round", "generate"] == counted["call.verify", "round"] == rounds > 0
    assert counted["verify", "call.verify"] == counted["verify.forward", "verify"] == rounds
    verified = [span for span in found if span.name == "verify"]
    for span in verified:
        assert set(span.attributes or ()) == ATTRIBUTES["verify"] - {"tandem.probes"} | {
            "tandem.inside"
        }
    numbers = [(span.attributes or {})["tandem.round"] for span in verified]
    assert numbers == list(range(1, rounds + 1))
    assert_children_within_parents(found)
    linked = {link.context.trace_id for one in passes(exporter) for link in one.links}
    assert linked == {TRACE_ID}


async def test_children_lie_within_their_parents(
    stack: Stack, exporter: InMemorySpanExporter
) -> None:
    await stack.orchestrator.Complete(
        pb.CompleteRequest(generation=generation()), metadata=METADATA
    )
    assert_children_within_parents(await finished(exporter))


async def test_stages_lie_where_they_happened(stack: Stack, exporter: InMemorySpanExporter) -> None:
    """One after the other, and a step's named parts leave little of it."""
    await stack.orchestrator.Complete(
        pb.CompleteRequest(generation=generation()), metadata=METADATA
    )
    below: dict[int, list[ReadableSpan]] = {}
    found = await finished(exporter)
    for span in found:
        if span.parent is not None:
            below.setdefault(span.parent.span_id, []).append(span)
    for step in (span for span in found if span.name in ("draft", "verify")):
        stages = sorted(below[step.context.span_id], key=lambda span: span.start_time or 0)
        for one, following in itertools.pairwise(stages):
            assert (one.end_time or 0) <= (following.start_time or 0)
        assert [span.name.split(".")[1] for span in stages if span.name.endswith("forward")]


async def test_a_pass_is_linked_with_the_steps_that_it_served(
    stack: Stack, exporter: InMemorySpanExporter
) -> None:
    texts = [
        stack.orchestrator.Complete(pb.CompleteRequest(generation=generation()), metadata=METADATA)
        for _ in range(4)
    ]
    await asyncio.gather(*texts)
    steps = {span.context.span_id: span for span in await finished(exporter, 40)}
    served: Counter[str] = Counter()
    for one in passes(exporter):
        assert one.parent is None
        assert one.context.trace_id != TRACE_ID
        size = (one.attributes or {})["tandem.batch_size"]
        assert size == len(one.links) >= 1
        for link in one.links:
            step = steps[link.context.span_id]
            served[step.name] += 1
            assert (step.start_time or 0) <= (one.start_time or 0)
            assert (one.end_time or 0) <= (step.end_time or 0)
    forward = Counter(span.name for span in steps.values())
    assert all(served[step] == forward[f"{step}.forward"] for step in ("draft", "verify"))


async def test_the_first_token_is_an_event(stack: Stack, exporter: InMemorySpanExporter) -> None:
    await stack.orchestrator.Complete(
        pb.CompleteRequest(generation=generation()), metadata=METADATA
    )
    (root,) = [span for span in await finished(exporter) if span.name == "generate"]
    (event,) = root.events
    assert event.name == "first_token"
    assert (root.start_time or 0) < event.timestamp < (root.end_time or 0)


@pytest.mark.parametrize("asked_for", [False, True])
async def test_texts_are_in_spans_only_where_they_are_asked_for(
    exporter: InMemorySpanExporter, asked_for: bool
) -> None:
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    target = FakeTarget()
    target.tokenizer_json = tokenizer.to_str().encode()
    async with orchestrate(FakeDrafter(), target, trace_text=asked_for) as stub:
        reply = await stub.Complete(request(), metadata=METADATA)
    written: list[str] = []
    for span in sorted(await finished(exporter), key=lambda span: span.start_time or 0):
        attributes: Any = span.attributes or {}
        if asked_for and span.name in ("open", "round"):
            kept = attributes.get("tandem.accepted", 0)
            written += attributes["tandem.text.drafted"][:kept]
            written.append(attributes["tandem.text.next"])
        else:
            assert not [key for key in attributes if "text" in key and "gen_ai" not in key]
    assert written == [f"w{token_id}" for token_id in reply.token_ids] * asked_for


def test_the_document_lists_these_spans_and_no_others() -> None:
    section = DOCUMENT.read_text().partition("## Metrics")[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if "|" in line]
    listed: dict[str, set[str]] = {}
    parents: set[tuple[str, str]] = set()
    for row in rows:
        if len(row) == 6 and (name := row[0].strip()).startswith("`"):
            listed[name.strip("`")] = set(re.findall(r"`([^`]+)`", row[5]))
            parents |= {(name.strip("`"), above) for above in re.findall(r"`([^`]+)`", row[1])}
    assert set(listed) == {name for name, _ in SURE | BRIEF} - STAGES | {"pass"}
    for name, attributes in listed.items():
        assert attributes == ATTRIBUTES.get(name, set()), name
    assert parents == {edge for edge in SURE | BRIEF if edge[0] not in STAGES} - {
        ("generate", "caller")
    }
    stages = {name for row in rows if len(row) == 2 for name in re.findall(r"`([^`]+)`", row[0])}
    assert {
        name
        for stage in stages
        for name in ([f"{step}{stage}" for step in STEPS] if stage[0] == "." else [stage])
    } == STAGES

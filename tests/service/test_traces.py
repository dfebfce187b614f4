"""The contract of the spans: names, parents and attributes, however a request ends."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import SpanKind, StatusCode
from tokenizers import Tokenizer, models

from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.telemetry import spans
from tandem.telemetry.export import ReadableExporter, SpanWriter
from tandem.telemetry.stages import STEP_STAGES, span_of
from tests.service.conftest import Stack
from tests.service.fakes import FakeDrafter, FakeTarget, orchestrate, request
from tests.service.test_generate import generation

DOCUMENT = Path(__file__).parents[2] / "docs" / "telemetry.md"
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
# What is too short has no span of its own.
STEPS = ("prefill", "draft", "verify")
STAGES = {span_of(step, stage) for step in STEPS for stage in STEP_STAGES}
BRIEF = {
    ("detokenize", "round"),
    ("detokenize", "generate"),  # the token of the prefill
    ("send", "generate"),
    ("wait", "generate"),
}
PARENTS = SURE | BRIEF | {(stage, stage.split(".")[0]) for stage in STAGES}
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
        "gen_ai.response.finish_reasons",
    },
    "round": {
        "tandem.round",
        "tandem.gamma",
        "tandem.depth",
        "tandem.nodes",
        "tandem.place",
        "tandem.accepted",
        "tandem.verifier",
    },
    "draft": {
        "tandem.request_id",
        "tandem.round",
        "tandem.gamma",
        "tandem.depth",
        "tandem.nodes",
        "tandem.batch_size",
        "tandem.draft_bytes",
    },
    "verify": {
        "tandem.request_id",
        "tandem.round",
        "tandem.depth",
        "tandem.nodes",
        "tandem.place",
        "tandem.accepted",
        "tandem.verifier",
        "tandem.batch_size",
    },
    "prefill": {"tandem.request_id", "tandem.prompt_tokens", "tandem.batch_size"},
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


def processor_of(exporter: InMemorySpanExporter) -> SimpleSpanProcessor:
    """Writes at once."""
    return SimpleSpanProcessor(ReadableExporter(exporter, Resource({})))


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    """What all spans of this process are written to."""
    exporter = InMemorySpanExporter()
    spans.install(SpanWriter(TracerProvider(), processor_of(exporter)))
    yield exporter
    spans.install(None)


async def finished(exporter: InMemorySpanExporter, count: int = 1) -> list[ReadableSpan]:
    """All spans of our trace, once the services' last ones are there: they lag their replies."""
    found: list[ReadableSpan] = []
    for _ in range(100):
        before, found = len(found), list(exporter.get_finished_spans())
        if len(found) == before >= count and any(span.name == "generate" for span in found):
            break
        await asyncio.sleep(0.05)
    found = [span for span in found if span.name != "pass"]
    assert {span.context.trace_id for span in found} == {TRACE_ID}
    return found


def passes(exporter: InMemorySpanExporter) -> list[ReadableSpan]:
    """Roots of traces of their own."""
    return [span for span in exporter.get_finished_spans() if span.name == "pass"]


def edges(found: list[ReadableSpan]) -> Counter[tuple[str, str]]:
    names = {span.context.span_id: span.name for span in found} | {CALLER: "caller"}
    return Counter(
        (span.name, names[span.parent.span_id]) for span in found if span.parent is not None
    )


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


async def test_children_lie_within_their_parents(
    stack: Stack, exporter: InMemorySpanExporter
) -> None:
    await stack.orchestrator.Complete(
        pb.CompleteRequest(generation=generation()), metadata=METADATA
    )
    found = await finished(exporter)
    by_id = {span.context.span_id: span for span in found}
    for span in found:
        parent = by_id.get(span.parent.span_id) if span.parent else None
        if parent is not None:
            assert (parent.start_time or 0) <= (span.start_time or 0)
            assert (span.end_time or 0) <= (parent.end_time or 0), span.name


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
    await asyncio.sleep(0.2)
    found = exporter.get_finished_spans()
    roots = [span for span in found if span.parent is None and span.name != "pass"]
    assert [span.name for span in roots] == ["generate"]
    assert {"draft", "verify"} <= {span.name for span in found}


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


async def test_unsampled_requests_record_nothing(
    stack: Stack, exporter: InMemorySpanExporter
) -> None:
    unsampled = (("traceparent", METADATA[0][1][:-2] + "00"),)
    await stack.orchestrator.Complete(
        pb.CompleteRequest(generation=generation()), metadata=unsampled
    )
    await asyncio.sleep(0.2)
    assert not exporter.get_finished_spans()


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

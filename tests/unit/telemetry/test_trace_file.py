"""A trace file holds whole lines of OTLP-JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import SpanKind

from tandem.errors import InvalidRequest
from tandem.telemetry.stages import StageTimes
from tandem.telemetry.tracing import spans
from tandem.telemetry.tracing.export import SpanWriter
from tandem.telemetry.tracing.spans import Span
from tandem.telemetry.tracing.steps import PassRecord, StepSpan
from tandem.telemetry.tracing.trace_file import TraceFile

AWKWARD = 'a "quoted"\nline, \\ and ü'


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """Where all spans of this process go."""
    path = tmp_path / "below" / "trace.jsonl"
    file = TraceFile(path, Resource({"service.name": AWKWARD, "n": 3}))
    spans.install(SpanWriter(TracerProvider(), SimpleSpanProcessor(file)))
    yield path
    spans.install(None)


def read(path: Path) -> list[dict[str, Any]]:
    found = []
    for line in path.read_text().splitlines():
        (resource,) = json.loads(line)["resourceSpans"]
        assert resource["resource"]["attributes"] == [
            {"key": "service.name", "value": {"stringValue": AWKWARD}},
            {"key": "n", "value": {"intValue": "3"}},
        ]
        (scope,) = resource["scopeSpans"]
        found += scope["spans"]
    return found


def test_every_part_of_a_span_is_written(path: Path) -> None:
    root = spans.head("generate", {})
    assert root is not None
    span = Span("call.draft", root.context, SpanKind.CLIENT, (root.context,), start_ns=5)
    span.attributes = {
        "yes": True,
        "whole": -(2**62),
        "real": 0.25,
        "text": AWKWARD,
        "list": ["a", "b"],
        "none": [],
    }
    span.events.append(("first_token", 7))
    span.fail(InvalidRequest(AWKWARD))
    span.end(9)
    (written,) = read(path)
    ids = {"traceId": f"{root.context.trace_id:032x}", "spanId": f"{root.context.span_id:016x}"}
    error = written.pop("status")
    assert (error["code"], json.dumps(AWKWARD)[1:8] in json.dumps(error["message"])) == (2, True)
    assert written == {
        "traceId": ids["traceId"],
        "spanId": f"{span.context.span_id:016x}",
        "parentSpanId": ids["spanId"],
        "name": "call.draft",
        "kind": 3,
        "startTimeUnixNano": "5",
        "endTimeUnixNano": "9",
        "attributes": [
            {"key": "yes", "value": {"boolValue": True}},
            {"key": "whole", "value": {"intValue": str(-(2**62))}},
            {"key": "real", "value": {"doubleValue": 0.25}},
            {"key": "text", "value": {"stringValue": AWKWARD}},
            {
                "key": "list",
                "value": {"arrayValue": {"values": [{"stringValue": "a"}, {"stringValue": "b"}]}},
            },
            {"key": "none", "value": {"arrayValue": {"values": []}}},
            {"key": "error.type", "value": {"stringValue": "InvalidRequest"}},
        ],
        "events": [{"name": "first_token", "timeUnixNano": "7"}],
        "links": [ids],
    }


def test_what_cannot_be_written_is_lost_alone(path: Path) -> None:
    root = spans.head("generate", {})
    assert root is not None
    broken = Span("broken", root.context)
    broken.attributes["what"] = object()  # type: ignore[assignment]
    broken.end()
    lone = Span("lone", root.context)
    lone.fail(InvalidRequest("half a pair: \ud800"))
    lone.end()
    Span("sound", root.context).end()
    assert [span["name"] for span in read(path)] == ["lone", "sound"]


def test_only_our_own_sentences_are_written(path: Path) -> None:
    """A library's may quote a prompt; and the frames of an error are not kept."""
    root = spans.head("generate", {})
    assert root is not None
    step = StepSpan(root.context)
    error = ValueError("my secret prompt")
    held = sys.getrefcount(error)
    step.record("verify", None, {}, error)
    assert sys.getrefcount(error) == held
    (written,) = read(path)
    assert written["status"] == {"code": 2, "message": "ValueError"}
    assert "secret" not in path.read_text()


@pytest.mark.parametrize(
    "header",
    ["", "00-" + "0" * 32 + "-" + "1" * 16 + "-01", "00-" + "1" * 32 + "-" + "0" * 16 + "-01"]
    + [f"00-{sign}{'1' * 31}-{'1' * 16}-01" for sign in "-+_ A"]
    + [f"00-{'1' * 32}-{'1' * 16}-{flags}" for flags in ("00", "0x", "-1")],
)
def test_a_callers_span_is_known_by_its_digits_alone(path: Path, header: str) -> None:
    assert spans.caller_of(header) is None
    found = spans.caller_of(f"00-{'a' * 32}-{'b' * 16}-01")
    assert found is not None
    assert (found.trace_id, found.span_id) == (int("a" * 32, 16), int("b" * 16, 16))


def test_a_step_is_one_record_and_several_spans(path: Path) -> None:
    root = spans.head("generate", {})
    assert root is not None
    step = StepSpan(root.context)
    at, ms = step._zero_ns, 1_000_000
    times = StageTimes(stamps=[])
    times.waited(at + ms, at + 2 * ms, at + 2 * ms + 9_000)  # the engine, others for 9 us
    times.computed(at + 3 * ms, at + 3 * ms + 5, at + 5 * ms)  # a pass of 5 ns
    spans.write(PassRecord([step.context], at + 3 * ms, at + 3 * ms + 5, 1, 7))
    step._end_ns = at + 6 * ms
    step.record("draft", times, {"tandem.round": 1})
    one_pass, own, *stages = read(path)
    assert one_pass["links"][0]["spanId"] == own["spanId"] == f"{step.context.span_id:016x}"
    assert one_pass["traceId"] != own["traceId"]
    start = int(own["startTimeUnixNano"])
    laid = {
        stage["name"]: tuple(int(stage[f"{end}TimeUnixNano"]) - start for end in ("start", "end"))
        for stage in stages
    }
    # What is shorter than 50 us has none, but for a pass.
    assert laid == {
        "draft.read": (0, ms),
        "draft.queue": (ms, 2 * ms),
        "draft.forward": (3 * ms, 3 * ms + 5),
        "draft.draw": (3 * ms + 5, 5 * ms),
        "draft.reply": (5 * ms, 6 * ms),
    }
    assert int(own["endTimeUnixNano"]) - start == 6 * ms
    assert {stage["parentSpanId"] for stage in stages} == {own["spanId"]}

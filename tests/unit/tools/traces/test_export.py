"""Exports: trace events in the format of viewers, and a table of spans."""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tandem.tools.traces.read.recording import Recording
from tandem.tools.traces.show import perfetto, spreadsheet
from tests.support.traces import MS, Tape, request, request_ms

NUMBER = {"type": "number"}
ID = {"type": "integer", "minimum": 0}
# The document "Trace Event Format" for the phases that we write.
SCHEMA = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "traceEvents": {"type": "array", "items": {"$ref": "#/$defs/event"}},
    },
    "additionalProperties": False,
    "$defs": {
        "event": {
            "oneOf": [
                {"$ref": "#/$defs/complete"},
                {"$ref": "#/$defs/metadata"},
                {"$ref": "#/$defs/flow"},
            ]
        },
        "complete": {
            "type": "object",
            "required": ["ph", "name", "cat", "ts", "dur", "pid", "tid"],
            "properties": {
                "ph": {"const": "X"},
                "name": {"type": "string", "minLength": 1},
                "cat": {"type": "string"},
                "ts": NUMBER,
                "dur": {"type": "number", "minimum": 0},
                "pid": ID,
                "tid": ID,
                "args": {"type": "object"},
            },
            "additionalProperties": False,
        },
        "metadata": {
            "type": "object",
            "required": ["ph", "name", "pid", "args"],
            "properties": {
                "ph": {"const": "M"},
                "name": {"enum": ["process_name", "thread_name"]},
                "pid": ID,
                "tid": ID,
                "args": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {"name": {"type": "string", "minLength": 1}},
                },
            },
            "additionalProperties": False,
        },
        "flow": {
            "type": "object",
            "required": ["ph", "name", "cat", "id", "ts", "pid", "tid"],
            "properties": {
                "ph": {"enum": ["s", "f"]},
                "name": {"type": "string"},
                "cat": {"type": "string"},
                "id": ID,
                "ts": NUMBER,
                "pid": ID,
                "tid": ID,
                "bp": {"const": "e"},
            },
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def recording(tmp_path: Path) -> Callable[[], Recording]:
    tape = Tape({"target": 250.0})
    request(tape, [(4, 2), (4, 4), (0, 0)], trace=1)
    request(tape, [(2, 0)] * 5, trace=2, start=7.0)
    lonely = tape.span("orchestrator", "generate", 0, 20, kind="SERVER", trace=3)
    round_ = tape.span("orchestrator", "round", 1, 19, lonely, trace=3, tandem__accepted=0)
    tape.span("drafter", "draft", 2, 9, round_, "SERVER", trace=3)  # and never a verify
    tape.span("target", "pass", 30, 35, trace=4, tandem__batch_size=2, tandem__tokens=9)
    path = tape.write(tmp_path / "trace.jsonl")
    return lambda: Recording([str(path)])


def written(recording: Recording, write: Callable[..., None], only: str | None = None) -> str:
    pieces: list[str] = []
    write(recording, recording.request(only) if only else None, pieces.append)
    return "".join(pieces)


def events(recording: Recording, only: str | None = None) -> list[dict[str, Any]]:
    document = json.loads(written(recording, perfetto.write, only))
    Draft202012Validator(SCHEMA).validate(document)
    found: list[dict[str, Any]] = document["traceEvents"]
    return found


def test_services_are_processes_and_requests_threads(recording: Callable[[], Recording]) -> None:
    found = events(recording())
    named = {(e["name"], e["pid"]): e["args"]["name"] for e in found if e["name"] == "process_name"}
    assert sorted(named.values()) == [
        "drafter drafter-",
        "orchestrator orchestr",
        "target target-0",
    ]
    threads = {e["args"]["name"] for e in found if e["name"] == "thread_name"}
    assert {"request-1", "request-2", "request-1, beside 1", "passes"} <= threads
    where = {(e["pid"], e["tid"]) for e in found if e["ph"] == "X"}
    assert where == {(e["pid"], e["tid"]) for e in found if e["name"] == "thread_name"}
    spans = [e for e in found if e["ph"] == "X"]
    assert len({e["args"]["span_id"] for e in spans}) == len(spans)


def test_slices_of_a_thread_nest(recording: Callable[[], Recording]) -> None:
    """What overlaps without nesting would be drawn wrongly, or dropped."""
    threads: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events(recording()):
        if event["ph"] == "X":
            start, lasts = round(event["ts"] * 1000), round(event["dur"] * 1000)
            threads[event["pid"], event["tid"]].append((start, start + lasts))
    for slices in threads.values():
        open_: list[int] = []
        for start, end in sorted(slices, key=lambda s: (s[0], -s[1])):
            while open_ and open_[-1] <= start:
                open_.pop()
            assert not open_ or end <= open_[-1]
            open_.append(end)


def test_every_arrow_has_both_ends_within_their_slices(
    recording: Callable[[], Recording],
) -> None:
    found = events(recording())
    arrows: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
    for event in found:
        if event["ph"] in "sf":
            assert event["ph"] not in arrows[event["id"]]
            arrows[event["id"]][event["ph"]] = event
    assert len(arrows) == 2 + 5  # none of the round without a draft, or without its verify
    for ends in arrows.values():
        assert ends["s"]["ts"] < ends["f"]["ts"]
        for phase, name in (("s", "draft"), ("f", "verify")):
            end = ends[phase]
            assert any(
                e["ph"] == "X"
                and (e["name"], e["pid"], e["tid"]) == (name, end["pid"], end["tid"])
                and e["ts"] <= end["ts"] <= e["ts"] + e["dur"]
                for e in found
            )


def test_one_request_alone(recording: Callable[[], Recording]) -> None:
    found = events(recording(), only="request-2")
    threads = {e["args"]["name"] for e in found if e["name"] == "thread_name"}
    assert threads == {"request-2", "request-2, beside 1"}


def test_a_line_a_span(recording: Callable[[], Recording]) -> None:
    rows = list(csv.DictReader(written(recording(), spreadsheet.write).splitlines()))
    assert len(rows) == sum(e["ph"] == "X" for e in events(recording()))
    mine = [row for row in rows if row["request_id"] == "request-1"]
    waited = sum(int(row["waited_ns"]) for row in mine)
    assert waited == request_ms([(4, 2), (4, 4), (0, 0)]) * MS
    draft = next(row for row in mine if row["name"] == "draft" and row["round"] == "2")
    assert (draft["service"], draft["kind"], draft["depth"]) == ("drafter", "server", "4")
    forward = next(row for row in mine if row["name"] == "verify.forward")
    assert (forward["stage_service"], forward["stage"]) == ("target", "verify.forward")
    assert forward["round"] == "1"
    (one,) = [row for row in rows if row["name"] == "pass"]
    assert (one["batch_size"], one["tokens"], one["request_id"]) == ("2", "9", "")


def test_a_request_as_a_table(recording: Callable[[], Recording]) -> None:
    rows = csv.DictReader(written(recording(), spreadsheet.write, "request-2").splitlines())
    assert {row["request_id"] for row in rows} == {"request-2"}

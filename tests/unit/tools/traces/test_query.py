"""Traces from the query APIs of Jaeger and Tempo, in the formats of their answers."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tandem.failure import Failure, Misconfigured
from tandem.tools.traces.read import query
from tandem.tools.traces.read.query import Query
from tandem.tools.traces.read.recording import Recording
from tests.support.traces import Tape, request

Answer = Callable[[str, dict[str, list[str]]], tuple[int, Any]]


class Api:
    """A server whose answers a test gives; remembers what it was asked."""

    def __init__(self) -> None:
        self.answer: Answer = lambda path, wanted: (404, {})
        self.asked: list[tuple[str, dict[str, list[str]]]] = []
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                wanted = parse_qs(parts.query)
                api.asked.append((parts.path, wanted))
                status, body = api.answer(parts.path, wanted)
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def api() -> Iterator[Api]:
    api = Api()
    thread = threading.Thread(target=api.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield api
    api.server.shutdown()
    thread.join()
    api.server.server_close()


@pytest.fixture
def tape() -> Tape:
    tape = Tape()
    for trace in (1, 2):
        request(tape, [(2, 1)], trace=trace)
    return tape


def resource_spans(tape: Tape) -> list[Any]:
    return [part for line in tape.lines() for part in json.loads(line)["resourceSpans"]]


def ids(recording: Recording) -> list[str]:
    return [found.id for found in recording.requests()]


def test_jaegers_traces_come_in_one_answer(api: Api, tape: Tape) -> None:
    api.answer = lambda path, wanted: (200, {"result": {"resourceSpans": resource_spans(tape)}})
    told: list[int] = []
    recording = Recording([f"jaeger:{api.url}?since=2h&limit=5"], told.append)
    assert ids(recording) == ["request-1", "request-2"]
    assert sum(told) > 10_000
    ((path, wanted),) = api.asked
    assert path == "/api/v3/traces"
    assert wanted["query.service_name"] == ["orchestrator"]
    assert wanted["query.num_traces"] == wanted["query.search_depth"] == ["5"]
    begin, end = wanted["query.start_time_min"][0], wanted["query.start_time_max"][0]
    assert begin < end
    assert end.endswith("Z")


def test_tempos_traces_are_searched_and_fetched_one_by_one(api: Api, tape: Tape) -> None:
    """With ids in base64 and kinds by name, as protobuf has them in JSON."""

    def answer(path: str, wanted: dict[str, list[str]]) -> tuple[int, Any]:
        if path == "/api/search":
            return 200, {"traces": [{"traceID": "1"}, {"traceID": "2"}, {"traceID": "gone"}]}
        number = path.removeprefix("/api/traces/")
        if number == "gone":
            return 404, b"trace not found"
        batches = []
        for part in resource_spans(tape):
            for scope in part["scopeSpans"]:
                mine = [s for s in scope["spans"] if int(s["traceId"], 16) == int(number)]
                scope["spans"] = [as_protobuf(span) for span in mine]
            batches.append(part)
        return 200, {"batches": batches}

    api.answer = answer
    recording = Recording([f"tempo:{api.url}/"])
    (first, second) = recording.requests()
    assert (first.id, second.id) == ("request-1", "request-2")
    assert len(first.spans) > 20
    assert next(first.rounds()).verify is not None
    assert "generate" in api.asked[0][1]["q"][0]


def as_protobuf(span: dict[str, Any]) -> dict[str, Any]:
    kinds = {1: "SPAN_KIND_INTERNAL", 2: "SPAN_KIND_SERVER", 3: "SPAN_KIND_CLIENT"}
    changed = {
        key: base64.b64encode(bytes.fromhex(span[key])).decode()
        for key in ("traceId", "spanId", "parentSpanId")
        if key in span
    }
    return span | changed | {"kind": kinds[span["kind"]]}


def test_an_api_without_traces_of_ours(api: Api) -> None:
    for kind in ("jaeger", "tempo"):
        with pytest.raises(Misconfigured, match=f"no span of Tandem in {kind}:"):
            Recording([f"{kind}:{api.url}"])


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (500, {"error": "storage"}, "answers 500"),
        (200, b"<html>", "does not answer in JSON"),
        (200, b"x" * 2_000, "too much at once"),
    ],
)
def test_answers_that_are_none(
    api: Api, status: int, body: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query, "_MAX_ANSWER_BYTES", 1_000)
    api.answer = lambda path, wanted: (status, body)
    for kind in ("jaeger", "tempo"):
        with pytest.raises(Failure, match=said):
            Recording([f"{kind}:{api.url}"])


@pytest.mark.parametrize("body", [{"result": 3}, [1], {"traces": 3}, {"traces": [{"traceID": 1}]}])
def test_json_of_another_kind(api: Api, body: Any) -> None:
    api.answer = lambda path, wanted: (200, body)
    for kind in ("jaeger", "tempo"):
        with pytest.raises((Misconfigured, Failure)):
            Recording([f"{kind}:{api.url}"])


def test_nobody_answers() -> None:
    with pytest.raises(Failure, match="does not answer"):
        Recording(["jaeger:http://127.0.0.1:1"])


@pytest.mark.parametrize(
    "address",
    [
        "jaeger:localhost:16686",
        "jaeger:ftp://host",
        "tempo:http://",
        "jaeger:http://host?since=yesterday",
        "jaeger:http://host?limit=0",
        "jaeger:http://host?service=shop",
    ],
)
def test_addresses_that_are_wrong(address: str) -> None:
    with pytest.raises(Misconfigured):
        Query.of(address)


def test_a_name_with_a_colon_may_be_a_file() -> None:
    assert Query.of("traces:today.jsonl") is None
    assert Query.of("jaeger:") is None

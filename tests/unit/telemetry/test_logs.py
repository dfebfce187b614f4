"""Log lines: which request they belong to, and how many a dead collector causes."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from tandem.telemetry import logs
from tandem.telemetry.tracing.ids import SpanIds


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """What a service logs."""
    root = logging.getLogger()
    before = structlog.get_config(), root.handlers[:], root.level
    root.handlers = []  # `configure` would close them
    logs.configure("target", "info", "json")
    (handler,) = root.handlers
    assert isinstance(handler, logging.StreamHandler)
    written = io.StringIO()
    handler.setStream(written)
    yield written
    structlog.contextvars.clear_contextvars()
    structlog.configure(**before[0])
    root.handlers, root.level = before[1], before[2]


def lines(written: io.StringIO) -> list[dict[str, str]]:
    return [json.loads(line) for line in written.getvalue().splitlines()]


def test_a_line_carries_the_ids_of_its_request(written: io.StringIO) -> None:
    log = structlog.get_logger("test")
    log.info("before")
    logs.bind_request("r-1")
    logs.bind_span(SpanIds(0xABC, 0xDEF))
    log.info("within")
    logging.getLogger("a.library").warning("a library's")
    before, within, library = lines(written)
    assert "trace_id" not in before
    for line in (within, library):
        assert (line["request_id"], line["service"]) == ("r-1", "target")
        assert (line["trace_id"], line["span_id"]) == (f"{0xABC:032x}", f"{0xDEF:016x}")
        assert "span" not in line


def test_a_dead_collector_makes_one_line_in_ten_minutes(
    written: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("tandem.telemetry.logs.time.monotonic", lambda: now[0])
    exporter = logging.getLogger("opentelemetry.exporter.otlp")
    for _ in range(100):
        exporter.warning("Transient error %s", "UNAVAILABLE")
        now[0] += 1
    logging.getLogger("opentelemetrical").warning("another's")
    now[0] += 600
    exporter.warning("Transient error %s", "UNAVAILABLE")
    exporter.warning("Transient error %s", "UNAVAILABLE")
    assert [line["event"] for line in lines(written)] == [
        "Transient error UNAVAILABLE",
        "another's",
        "Transient error UNAVAILABLE (and 99 others)",
    ]

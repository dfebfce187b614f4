"""Lines of log: whose they are, and how many a dead collector makes."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
import structlog
from opentelemetry.trace import SpanContext

from tandem.telemetry import logs


@pytest.fixture(autouse=True)
def as_a_service(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    before = structlog.get_config(), logging.getLogger().handlers[:], logging.getLogger().level
    logs.configure("target", "info", "json")
    yield
    structlog.contextvars.clear_contextvars()
    structlog.configure(**before[0])
    logging.basicConfig(handlers=before[1], level=before[2], force=True)


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_a_line_carries_the_ids_of_its_request(capsys: pytest.CaptureFixture[str]) -> None:
    log = structlog.get_logger("test")
    log.info("before")
    logs.bind_request("r-1")
    logs.bind_span(SpanContext(0xABC, 0xDEF, False))
    log.info("within")
    logging.getLogger("a.library").warning("a library's")
    before, within, library = lines(capsys)
    assert "trace_id" not in before
    for line in (within, library):
        assert (line["request_id"], line["service"]) == ("r-1", "target")
        assert (line["trace_id"], line["span_id"]) == (f"{0xABC:032x}", f"{0xDEF:016x}")
        assert "span" not in line


def test_a_dead_collector_makes_one_line_in_ten_minutes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("tandem.telemetry.logs.time.monotonic", lambda: now[0])
    exporter = logging.getLogger("opentelemetry.exporter.otlp")
    for _ in range(100):
        exporter.warning("Transient error %s", "UNAVAILABLE")
        logging.getLogger("opentelemetry.sdk").error("Queue full")
        now[0] += 1
    logging.getLogger("opentelemetrical").warning("another's")
    now[0] += 600
    exporter.warning("Transient error %s", "UNAVAILABLE")
    exporter.warning("Transient error %s", "UNAVAILABLE")
    assert [line["event"] for line in lines(capsys)] == [
        "Transient error UNAVAILABLE",
        "another's",
        "Transient error UNAVAILABLE (and 199 others)",
    ]

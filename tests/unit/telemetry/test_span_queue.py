"""A queue of spans that is full costs a line, not a log record a span."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from tandem.telemetry.tracing import spans
from tandem.telemetry.tracing.export import SpanQueue, SpanWriter
from tandem.telemetry.tracing.spans import Span
from tests.support.waiting import HANG_SECONDS, wait_until

PLACES = 4


class Held(SpanExporter):
    """Takes a batch only when it may."""

    def __init__(self) -> None:
        self.may = threading.Semaphore(0)
        self.taken: list[str] = []

    def export(self, records: Sequence[Any]) -> SpanExportResult:
        assert self.may.acquire(timeout=HANG_SECONDS)
        self.taken += [record.name for record in records]
        return SpanExportResult.SUCCESS


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    """Every log record that is made, before any filter of a handler."""
    made: list[logging.LogRecord] = []
    factory = logging.getLogRecordFactory()

    def keep(*arguments: Any, **named: Any) -> logging.LogRecord:
        made.append(factory(*arguments, **named))
        return made[-1]

    logging.setLogRecordFactory(keep)
    yield made
    logging.setLogRecordFactory(factory)


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[SpanQueue, Held]]:
    """Where the spans of this process go: batches of two."""
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    exporter = Held()
    queue = SpanQueue(exporter, PLACES)
    spans.install(SpanWriter(TracerProvider(), queue))
    yield queue, exporter
    spans.install(None)
    exporter.may.release(1000)
    queue.shutdown()  # type: ignore[no-untyped-call]


def write(*names: str) -> None:
    for name in names:
        Span(name, None).end()


def test_a_full_queue_makes_one_log_record_and_drops_further_spans(
    queue: tuple[SpanQueue, Held], records: list[logging.LogRecord]
) -> None:
    processor, exporter = queue
    write("a", "b")
    wait_until(lambda: processor.waiting == 0)  # the exporter holds both
    write(*"cdef", *("lost" for _ in range(1000)))
    (full,) = records
    assert "raise OTEL_BSP_MAX_QUEUE_SIZE (now 4)" in full.getMessage()

    exporter.may.release()
    wait_until(lambda: processor.waiting == 2)
    write("g", "h", "lost")
    assert len(records) == 2
    exporter.may.release(1000)
    processor.force_flush()
    assert exporter.taken == list("abcdefgh")


def test_the_queue_reads_the_sdk_s_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "512")
    with pytest.raises(ValueError, match="less than or equal"):
        SpanQueue(Held(), 3)

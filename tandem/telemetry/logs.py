"""Structured logs: one line per event, in JSON unless standard error is a terminal."""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import structlog

from tandem.telemetry.tracing.ids import SpanIds

# Least time between two lines of an OpenTelemetry logger: it often retries a missing collector.
_EXPORT_SECONDS = 600.0
_SPAN = "span"


def bind_request(request_id: str) -> None:
    """Add a request's id to every line that is logged for it from now on."""
    structlog.contextvars.bind_contextvars(request_id=request_id)


def bind_caller(name: str) -> None:
    """Add a caller's name to every line that is logged for its call from now on."""
    structlog.contextvars.bind_contextvars(caller=name)


def bind_span(span: SpanIds) -> None:
    """Add a span's ids to every line that is logged for it from now on."""
    structlog.contextvars.bind_contextvars(**{_SPAN: span})


def _tell_span(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Format a span's ids, only for lines that are written."""
    if (span := event.pop(_SPAN, None)) is not None:
        event["trace_id"], event["span_id"] = f"{span.trace_id:032x}", f"{span.span_id:016x}"
    return event


class _ExportFailures(logging.Filter):
    """Passes one line of each OpenTelemetry logger in `_EXPORT_SECONDS`, with the number of lines
    it held back."""

    def __init__(self) -> None:
        super().__init__()
        # By logger: when the next line may pass, and how many lines were held back.
        self._next: dict[str, float] = {}
        self._others: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is written."""
        if not record.name.startswith("opentelemetry"):
            return True
        now, name = time.monotonic(), record.name
        if now < self._next.get(name, 0.0):
            self._others[name] += 1
            return False
        if others := self._others.pop(name, 0):
            record.msg, record.args = f"{record.getMessage()} (and {others} others)", ()
        self._next[name] = now + _EXPORT_SECONDS
        return True


def configure(
    service: str,
    level: str,
    style: Literal["auto", "json", "console"],
    loggers: Sequence[str] = (),
) -> None:
    """Send all logs, those of libraries too, to standard error.

    Args:
        service: appears in each line.
        level: as `logging` names it.
        style: "auto" is console on a terminal and JSON elsewhere.
        loggers: names of the only ones to send there, in a process of others; all where none is
            given.
    """
    console = style == "console" or (style == "auto" and sys.stderr.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        _tell_span,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: list[structlog.typing.Processor] = (
        # A traceback with its variables would print prompts.
        [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
        if console
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_ExportFailures())
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
            foreign_pre_chain=shared,
        )
    )
    if not loggers:
        logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in loggers:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper())
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)

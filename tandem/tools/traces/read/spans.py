"""Spans, parsed from OTLP-JSON."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

SCOPE = "tandem"
_HEX = re.compile(r"(?:[0-9a-fA-F]{2})*\Z")
_ID_BYTES = {"trace": 16, "span": 8}
_ERROR = 2

Value = str | int | float | bool | list[Any] | None


class RecordedKind(IntEnum):
    """Kind of a span, with OTLP's numbers."""

    UNSPECIFIED = 0
    INTERNAL = 1
    SERVER = 2
    CLIENT = 3
    PRODUCER = 4
    CONSUMER = 5


class Process(NamedTuple):
    """The process that wrote a span; each has its own clock."""

    service: str
    instance: str


@dataclass(slots=True)
class RecordedSpan:
    """One span.

    Attributes:
        trace_id: 32 hexadecimal digits.
        span_id: 16 hexadecimal digits.
        parent_id: 16 hexadecimal digits; empty for the first span of a trace.
        process: that wrote it.
        name: of the span.
        kind: client's or server's side of a call, or neither.
        start_ns: nanoseconds since the epoch, by the process's clock.
        end_ns: the same.
        failed: whether its status is ERROR.
        attributes: of the span.
        events: names and times.
        links: trace and span ids.
    """

    trace_id: str
    span_id: str
    parent_id: str
    process: Process
    name: str
    kind: int
    start_ns: int
    end_ns: int
    failed: bool
    attributes: dict[str, Value]
    events: list[tuple[str, int]]
    links: list[tuple[str, str]]

    @property
    def duration_ns(self) -> int:
        """From start to end."""
        return self.end_ns - self.start_ns

    def number(self, key: str) -> int | None:
        """An integer attribute; None if there is none of that name."""
        value = self.attributes.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def text(self, key: str) -> str:
        """A string attribute; empty if there is none of that name."""
        value = self.attributes.get(key)
        return value if isinstance(value, str) else ""


@dataclass(frozen=True)
class Foreign:
    """Spans of another program."""

    service: str
    count: int


@dataclass(frozen=True)
class Broken:
    """Spans without an id, a name or times."""

    count: int


def spans_of(document: Any) -> Iterator[RecordedSpan | Foreign | Broken]:
    """The spans of one OTLP-JSON document, a line of a file.

    Raises:
        ValueError: `document` is something else.
    """
    try:
        for resource in document["resourceSpans"]:
            process = _process(resource.get("resource", {}))
            for scope in resource.get("scopeSpans", ()):
                found = scope.get("spans", ())
                if scope.get("scope", {}).get("name") == SCOPE:
                    yield from _ours(found, process)
                elif found:
                    yield Foreign(process.service, len(found))
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError("not an OTLP document of spans") from error


def _process(resource: Any) -> Process:
    named = _attributes(resource)
    service, instance = named.get("service.name"), named.get("service.instance.id")
    return Process(str(service or "unknown"), str(instance or ""))


def _ours(found: list[Any], process: Process) -> Iterator[RecordedSpan | Broken]:
    for raw in found:
        try:
            yield _span(raw, process)
        except (TypeError, KeyError, AttributeError, ValueError):
            yield Broken(1)


def _span(raw: dict[str, Any], process: Process) -> RecordedSpan:
    start, end = int(raw["startTimeUnixNano"]), int(raw["endTimeUnixNano"])
    if not 0 <= start <= end < 1 << 63:
        raise ValueError("ends before it starts")
    parent = raw.get("parentSpanId")
    return RecordedSpan(
        trace_id=_id(raw["traceId"], "trace"),
        span_id=_id(raw["spanId"], "span"),
        parent_id=_id(parent, "span") if parent else "",
        process=process,
        name=str(raw["name"]),
        kind=_kind(raw.get("kind", 0)),
        start_ns=start,
        end_ns=end,
        failed=raw.get("status", {}).get("code") in (_ERROR, "STATUS_CODE_ERROR"),
        attributes=_attributes(raw),
        events=[(str(e["name"]), int(e["timeUnixNano"])) for e in raw.get("events", ())],
        links=[
            (_id(e["traceId"], "trace"), _id(e["spanId"], "span")) for e in raw.get("links", ())
        ],
    )


def _kind(raw: int | str) -> int:
    """A span's kind: a number in OTLP-JSON, but some writers use its name."""
    return (
        RecordedKind[raw.removeprefix("SPAN_KIND_")] if isinstance(raw, str) else RecordedKind(raw)
    )


def _id(raw: str, what: str) -> str:
    """An id's hexadecimal digits, from such digits or from base64 (protobuf's own JSON)."""
    digits = 2 * _ID_BYTES[what]
    if len(raw) == digits and _HEX.match(raw):
        return raw.lower()
    try:
        plain = base64.b64decode(raw, validate=True)
    except binascii.Error as error:
        raise ValueError(f"a {what} id must be hexadecimal") from error
    if len(plain) != _ID_BYTES[what]:
        raise ValueError(f"a {what} id must have {digits} digits")
    return plain.hex()


def _attributes(raw: dict[str, Any]) -> dict[str, Value]:
    return {str(pair["key"]): _value(pair["value"]) for pair in raw.get("attributes", ())}


def _value(raw: dict[str, Any]) -> Value:
    for kind, value in raw.items():
        match kind:
            case "stringValue":
                return str(value)
            case "intValue":
                return int(value)
            case "doubleValue":
                return float(value)
            case "boolValue":
                return bool(value)
            case "arrayValue":
                return [_value(each) for each in value.get("values", ())]
    return None

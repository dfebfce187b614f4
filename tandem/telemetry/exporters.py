"""The exporter that OTEL_* variables ask for, for any signal."""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from typing import Any

from tandem.errors import StartupError

_PROTOCOLS = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}


def chosen(signal: str) -> str:
    """Entry-point name of the exporter of a signal ("traces", "metrics").

    OTEL_{signal}_EXPORTER if set, else OTLP if an endpoint for it is set, else "none".

    Raises:
        StartupError: the OTLP protocol is unknown.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return "none"
    shout = signal.upper()
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{shout}_ENDPOINT")
    fallback = "otlp" if any(os.environ.get(name) for name in endpoints) else "none"
    name = os.environ.get(f"OTEL_{shout}_EXPORTER") or fallback
    if name != "otlp":
        return name
    variables = (f"OTEL_EXPORTER_OTLP_{shout}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next(filter(None, map(os.environ.get, variables)), "grpc")
    if protocol not in _PROTOCOLS:
        raise StartupError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL asks for {protocol!r}; use {' or '.join(_PROTOCOLS)}"
        )
    return _PROTOCOLS[protocol]


def installed(signal: str, name: str) -> Any:
    """An installed exporter, configured by its own OTEL_* variables.

    Raises:
        StartupError: the exporter is not installed, or cannot be made.
    """
    found = entry_points(group=f"opentelemetry_{signal}_exporter", name=name)
    if not found:
        raise StartupError(
            f"OTEL_{signal.upper()}_EXPORTER asks for {name!r}, which is not installed;"
            " use otlp, console or none"
        )
    try:
        return next(iter(found)).load()()
    except Exception as error:  # each exporter reads its own variables, and may raise anything
        raise StartupError(f"cannot make the exporter {name!r} from OTEL_*: {error}") from error

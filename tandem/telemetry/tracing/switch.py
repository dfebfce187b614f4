"""Turns tracing of the process on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tandem.errors import StartupError
from tandem.telemetry.tracing import spans

if TYPE_CHECKING:
    from tandem.telemetry.tracing.export import SpanWriter


def configure(service: str, trace_file: Path | None) -> SpanWriter | None:
    """Start recording the process's spans, and return their writer; None if nothing is traced.

    Raises:
        StartupError: an OTEL_* variable is wrong, or the file cannot be written.
    """
    try:
        # Imported here, since the SDK checks some of its variables at import.
        from tandem.telemetry.tracing.export import make_writer

        writer = make_writer(service, trace_file)
    except ValueError as error:
        raise StartupError(f"bad OTEL_* variable: {error}") from error
    spans.install(writer)
    return writer

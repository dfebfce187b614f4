"""Whether a service's metrics have a reader: if not, nothing is imported, kept or recorded."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tandem.errors import StartupError
from tandem.telemetry import exporters

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExporter

    from tandem.telemetry.metrics.metering import Metering


def metering_of(role: str, listen: str | None) -> Metering | None:
    """A service's metering; None if its metrics have no reader.

    Args:
        role: of the service.
        listen: host:port of the Prometheus endpoint (METRICS_LISTEN); None for none.

    Raises:
        StartupError: an OTEL_* variable is wrong.
    """
    exporter: MetricExporter | None = None
    name = exporters.chosen("metrics")
    if name != "none":
        try:
            # Imported here, since the SDK checks some of its variables at import.
            from tandem.telemetry.metrics.otlp import make_exporter

            exporter = make_exporter(name)
        except ValueError as error:
            raise StartupError(f"bad OTEL_* variable: {error}") from error
    if listen is None and exporter is None:
        return None
    from tandem.telemetry.metrics.metering import Metering

    return Metering(role, listen, exporter, _exemplars_wanted())


def _exemplars_wanted() -> bool:
    """Whether OTEL_METRICS_EXEMPLAR_FILTER leaves exemplars on.

    Raises:
        StartupError: it asks for exemplars without a trace, or for something unknown.
    """
    filter_ = os.environ.get("OTEL_METRICS_EXEMPLAR_FILTER") or "trace_based"
    if filter_ not in ("trace_based", "always_off"):
        raise StartupError(
            f"OTEL_METRICS_EXEMPLAR_FILTER asks for {filter_!r}; use trace_based or always_off:"
            " an exemplar leads to a trace"
        )
    return filter_ == "trace_based"

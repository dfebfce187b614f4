"""Whether a service's metrics have a reader: if not, nothing is imported, kept or recorded."""

from __future__ import annotations

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

    return Metering(role, listen, exporter)

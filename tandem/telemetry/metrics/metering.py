"""A service's metrics while it runs: its instruments and their readers."""

from __future__ import annotations

import asyncio
import time

import structlog
from opentelemetry.sdk.metrics.export import MetricExporter

from tandem.telemetry.metrics.catalog import EVENT_LOOP_LAG
from tandem.telemetry.metrics.exposition import Exposition
from tandem.telemetry.metrics.instruments import Instruments
from tandem.telemetry.metrics.otlp import OtlpMetrics, interval_seconds

_log = structlog.get_logger(__name__)

_LAG_INTERVAL_SECONDS = 0.1


class Metering:
    """Instruments with their readers: started with the service, stopped after it.

    Attributes:
        instruments: to record into.
        port: of the Prometheus endpoint once started; 0 without one.

    Args:
        role: of the service.
        listen: host:port of the Prometheus endpoint; None for none.
        exporter: sends by OTLP; None to send nothing.
        exemplars: whether measurements lead to traces.
    """

    def __init__(
        self,
        role: str,
        listen: str | None,
        exporter: MetricExporter | None,
        exemplars: bool = True,
    ) -> None:
        self.instruments = Instruments(role, exemplars)
        self.port = 0
        self._listen = listen
        self._exporter = exporter
        self._readers: list[Exposition | OtlpMetrics] = []
        self._lag: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the readers, and the measurement of the running loop's lag.

        Raises:
            StartupError: the endpoint's port is taken, or an OTEL_* variable is wrong.
        """
        if self._listen is not None:
            endpoint = Exposition(self._listen, self.instruments.registry)
            self._readers.append(endpoint)
            self.port = endpoint.port
            _log.info("metrics", address=self._listen, port=self.port)
        if self._exporter is not None:
            self._readers.append(OtlpMetrics(self.instruments, self._exporter, interval_seconds()))
        self._lag = asyncio.create_task(self._watch_loop())

    async def _watch_loop(self) -> None:
        lag = self.instruments.histogram(EVENT_LOOP_LAG, self.instruments.role)
        while True:
            due = time.perf_counter() + _LAG_INTERVAL_SECONDS
            await asyncio.sleep(_LAG_INTERVAL_SECONDS)
            lag.observe(max(time.perf_counter() - due, 0.0))

    async def stop(self) -> None:
        """Stop the readers; metrics are sent one last time."""
        if self._lag is not None:
            self._lag.cancel()
        for reader in self._readers:
            await asyncio.to_thread(reader.stop)

"""An orchestrator's metrics with a few values recorded."""

from __future__ import annotations

from tandem.telemetry.metrics import catalog as metrics
from tandem.telemetry.metrics.instruments import Instruments

TRACED = {"trace_id": "0af7651916cd43dd8448eb211c80319c", "span_id": "b7ad6b7169203331"}


def recorded() -> Instruments:
    """An orchestrator's, with a little in them."""
    instruments = Instruments("orchestrator")
    instruments.counter(metrics.ROUNDS).value += 3
    instruments.counter(metrics.REQUESTS, "OK", "length", "grpc").value += 2
    instruments.counter(metrics.REQUESTS, "CANCELLED", "", "grpc").value += 1
    instruments.watch(metrics.REQUESTS_ACTIVE, lambda: 7)
    of = ("text_completion", "tandem", "fake")
    first = instruments.histogram(metrics.TIME_TO_FIRST_TOKEN, *of)
    for seconds in (0.0005, 0.015, 0.02, 99.0):
        first.observe(seconds)
    first.observe(0.018, TRACED)
    whole = instruments.histogram(metrics.REQUEST_DURATION, *of, "CANCELLED")
    whole.observe(0.5)
    return instruments

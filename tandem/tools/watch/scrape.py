"""What a service's metrics say at a moment, as its Prometheus endpoint has it."""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

_Labels = frozenset[tuple[str, str]]

# A service's answer has some twenty kilobytes; more is something else.
_MAX_BYTES = 4 << 20
# How names of series end that only grow.
_COUNTS = ("_total", "_count", "_bucket", "_sum")


@dataclass(frozen=True)
class Scrape:
    """The series of one service.

    Attributes:
        at: when, by time.monotonic().
        values: by name and labels.
    """

    at: float
    values: Mapping[tuple[str, _Labels], float]

    def series(self, name: str, **labels: str) -> Iterator[tuple[dict[str, str], float]]:
        """Those of a name that have some labels, each with all its labels."""
        wanted = labels.items()
        for (found, own), value in self.values.items():
            if found == name and wanted <= own:
                yield dict(own), value

    def value(self, name: str, **labels: str) -> float:
        """Their sum; 0 without any."""
        return sum(value for _, value in self.series(name, **labels))

    def since(self, earlier: Scrape) -> Scrape:
        """By how much each series has grown; those of a service that is new, by all they have.

        It is new where any count of it has fallen: others may be beyond what they were already.
        """
        before = earlier.values
        if any(
            value < before.get(key, value)
            for key, value in self.values.items()
            if key[0].endswith(_COUNTS)
        ):
            before = {}
        grown = {key: value - before.get(key, 0.0) for key, value in self.values.items()}
        return Scrape(self.at, grown)


def scrape(endpoint: str, seconds: float) -> Scrape:
    """Ask an endpoint.

    Args:
        endpoint: host:port.
        seconds: that it may take.

    Raises:
        OSError: it does not answer.
        ValueError: it answers something else than metrics.
    """
    host, _, port = endpoint.rpartition(":")
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=seconds)
    try:
        connection.request("GET", "/metrics")
        reply = connection.getresponse()
        text = reply.read(_MAX_BYTES).decode()
    except http.client.HTTPException as error:
        raise ValueError(f"it does not speak HTTP: {type(error).__name__}") from error
    finally:
        connection.close()
    if reply.status != http.client.OK:
        raise ValueError(f"it answers {reply.status}")
    values = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    return Scrape(time.monotonic(), values)

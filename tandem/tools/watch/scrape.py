"""One scrape of a service's Prometheus endpoint."""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

_Labels = frozenset[tuple[str, str]]

# A service's answer has some twenty kilobytes; more is something else.
_MAX_BYTES = 4 << 20
# Suffixes of series that only grow.
_COUNTS = ("_total", "_count", "_bucket", "_sum")


@dataclass(frozen=True)
class Scrape:
    """The series of one service.

    Attributes:
        at: time of the scrape, by time.monotonic().
        values: by name and labels.
    """

    at: float
    values: Mapping[tuple[str, _Labels], float]

    def series(self, name: str, **labels: str) -> Iterator[tuple[dict[str, str], float]]:
        """The values of the series with a name and these labels, each with all its labels."""
        wanted = labels.items()
        for (found, own), value in self.values.items():
            if found == name and wanted <= own:
                yield dict(own), value

    def value(self, name: str, **labels: str) -> float:
        """The sum of those series; 0 without any."""
        return sum(value for _, value in self.series(name, **labels))

    def since(self, earlier: Scrape) -> Scrape:
        """How much each series has grown; after a restart of the service, its whole value.

        A restart shows in any counter that has fallen: others may already exceed their old value.
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
    """Scrape an endpoint.

    Args:
        endpoint: host:port.
        seconds: time limit.

    Raises:
        OSError: the endpoint does not answer.
        ValueError: the answer is not metrics.
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

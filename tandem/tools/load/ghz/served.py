"""A load, as the services' own metrics show it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.failure import Failure, Misconfigured
from tandem.telemetry.metrics import catalog as metrics
from tandem.tools.watch.figures import WatchedFigures, figures
from tandem.tools.watch.histogram import Histogram
from tandem.tools.watch.scrape import Scrape, scrape

_ANSWER_SECONDS = 5.0
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class ServedCounts:
    """What the metrics counted between two scrapes.

    Attributes:
        figures: tokens, acceptance, batches.
        tokens: emitted tokens.
        ttft: seconds from a request's arrival to its first token.
        tpot: seconds per further token, of texts that ended normally.
    """

    figures: WatchedFigures
    tokens: float
    ttft: Histogram
    tpot: Histogram

    @classmethod
    def between(cls, before: Mapping[str, Scrape], after: Mapping[str, Scrape]) -> ServedCounts:
        """From two scrapes of the same endpoints."""
        grown = [now.since(before[name]) for name, now in after.items() if name in before]
        seen = figures(before, after)
        return cls(
            seen,
            sum(scrape.value(metrics.TOKENS_EMITTED.prometheus_name) for scrape in grown),
            Histogram.of(metrics.TIME_TO_FIRST_TOKEN, grown),
            Histogram.of(metrics.TIME_PER_OUTPUT_TOKEN, grown),
        )


class Watch:
    """The metrics of running services.

    Args:
        endpoints: host:port of each service.
    """

    def __init__(self, endpoints: Sequence[str]) -> None:
        self._endpoints = endpoints

    def look(self) -> dict[str, Scrape]:
        """Scrape all endpoints; the results by endpoint.

        Raises:
            Failure: an endpoint does not answer.
        """
        return {endpoint: _scrape(endpoint) for endpoint in self._endpoints}

    def require(self) -> None:
        """Check, before minutes of load, that `left_open` will work.

        Raises:
            Misconfigured: see `left_open`.
        """
        try:
            self.left_open(0.0)
        except Failure as failure:
            raise Misconfigured(f"{failure}; name them with --metrics") from None

    def left_open(self, seconds: float) -> int:
        """Wait until no text or sequence is open; return how many still are after some seconds.

        Raises:
            Failure: a service does not answer, or none has metrics of sequences.
        """
        deadline = time.monotonic() + seconds
        while True:
            seen = list(self.look().values())
            names = [metrics.SEQUENCES_OPEN.prometheus_name]
            if not any(True for scrape in seen for _ in scrape.series(names[0])):
                raise Failure("no metrics of a drafter or a target, which count open sequences")
            names.append(metrics.REQUESTS_ACTIVE.prometheus_name)
            count = int(sum(scrape.value(name) for scrape in seen for name in names))
            if not count or time.monotonic() > deadline:
                return count
            time.sleep(_POLL_SECONDS)


def _scrape(endpoint: str) -> Scrape:
    try:
        return scrape(endpoint, _ANSWER_SECONDS)
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise Failure(f"no metrics at {endpoint}: {reason}") from None

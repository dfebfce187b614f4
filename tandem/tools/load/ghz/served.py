"""What the services' own metrics say of a load."""

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
    """Between two looks.

    Attributes:
        figures: tokens, acceptance, batches.
        tokens: emitted.
        ttft: seconds from a request's arrival to its first token.
        tpot: seconds a further token, of texts that came to their end.
    """

    figures: WatchedFigures
    tokens: float
    ttft: Histogram
    tpot: Histogram

    @classmethod
    def between(cls, before: Mapping[str, Scrape], after: Mapping[str, Scrape]) -> ServedCounts:
        """From the same endpoints at two moments."""
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
        endpoints: host:port of each service; none watches nothing.
    """

    def __init__(self, endpoints: Sequence[str]) -> None:
        self._endpoints = endpoints

    def look(self) -> dict[str, Scrape]:
        """By endpoint.

        Raises:
            Failure: one does not answer.
        """
        return {endpoint: _scrape(endpoint) for endpoint in self._endpoints}

    def require(self) -> None:
        """Find out before a load of minutes.

        Raises:
            Misconfigured: see `left_open`.
        """
        try:
            self.left_open(0.0)
        except Failure as failure:
            raise Misconfigured(f"{failure}; name them with --metrics") from None

    def left_open(self, seconds: float) -> int:
        """Texts and sequences that are still open once none is, or after some seconds.

        Raises:
            Failure: a service does not answer, or none tells of sequences.
        """
        deadline = time.monotonic() + seconds
        while True:
            seen = list(self.look().values())
            names = [metrics.SEQUENCES_OPEN.prometheus_name]
            if not any(True for scrape in seen for _ in scrape.series(names[0])):
                raise Failure("no metrics of a drafter or a target: nobody tells of sequences")
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

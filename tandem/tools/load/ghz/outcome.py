"""A scenario's outcome: its figures, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tandem.tools.load.ghz.calls import Calls
from tandem.tools.load.ghz.scenario import OK, Scenario
from tandem.tools.load.ghz.served import ServedCounts
from tandem.tools.load.objective import Goodput, Objective
from tandem.tools.load.timeline import Percentiles

_SHOWN_ERRORS = 5


@dataclass(frozen=True)
class Outcome:
    """The result of a load.

    Attributes:
        name: of the scenario.
        loop: how calls followed each other, in words.
        calls: as ghz measured them.
        expected: statuses that are no error.
        cuts: whether ghz cancelled the calls itself.
        ttft: measured by ghz; only if it cut calls after their first message.
        served: from the services' metrics; None without metrics.
        left_open: texts and sequences still open some seconds later; None if not checked.
        trouble: why the load could not be run, or its metrics could not be read.
    """

    name: str
    loop: str
    calls: Calls
    expected: Sequence[str] = (OK,)
    cuts: bool = False
    ttft: Percentiles | None = None
    served: ServedCounts | None = None
    left_open: int | None = None
    trouble: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {'; '.join(self.faults) or f'{self.calls.count} calls, none failed'}"

    @classmethod
    def of(
        cls,
        scenario: Scenario,
        calls: Calls,
        served: ServedCounts | None = None,
        left_open: int | None = None,
    ) -> Outcome:
        """The outcome of a scenario that was run."""
        expected = scenario.expected
        ttft = calls.latency(expected) if scenario.first_token_only else None
        return cls(
            name=scenario.name,
            loop=scenario.loop,
            calls=calls,
            expected=expected,
            cuts=scenario.cuts,
            ttft=ttft,
            served=served,
            left_open=left_open,
        )

    @property
    def failed(self) -> int:
        """Number of calls that ended with an error status."""
        return self.calls.count - self.calls.ended(self.expected)

    @property
    def faults(self) -> list[str]:
        """What is wrong; empty if all is well."""
        found = []
        if self.trouble:
            found.append(self.trouble)
        elif not self.calls.count:
            found.append("no call was counted")
        if self.failed:
            kinds = ", ".join(
                f"{count} {status}"
                for status, count in sorted(self.calls.statuses.items())
                if status not in self.expected
            )
            found.append(f"{self.failed} of {self.calls.count} calls failed: {kinds}")
        if self.left_open:
            found.append(f"{self.left_open} texts and sequences were left open")
        return found

    @property
    def reasons(self) -> list[str]:
        """The error messages of failed calls, the commonest first."""
        said = [
            f"{count} x {' '.join(error.split())}"
            for error, count in self.calls.errors.items()
            if not (self.cuts and "code = Canceled" in error)
        ]
        further = len(said) - _SHOWN_ERRORS
        return said if further <= 0 else [*said[:_SHOWN_ERRORS], f"and {further} other kinds"]

    def goodput(self, objective: Objective) -> Goodput | None:
        """A lower bound of the texts that met an objective; None if there is no telling.

        ghz knows the latency of each call. The services' histograms only count late first tokens
        and late tokens, but not of which text. So each one counts against a different text, and
        an observation in the same bucket as the limit counts as late.
        """
        if self.cuts or self.served is None or not self.calls.count:
            return None
        ended = good = float(self.calls.ended((OK,)))
        if objective.latency_ms is not None:
            good -= self.calls.slower(objective.latency_ms / 1e3, (OK,))
        if objective.ttft_ms is not None:
            seen = self.served.ttft
            # A successful call that is missing in the histogram counts as late.
            good -= max(seen.count, ended) - seen.surely_within(objective.ttft_ms / 1e3)
        if objective.tpot_ms is not None:
            # Texts of one token are not in this histogram.
            seen = self.served.tpot
            good -= seen.count - seen.surely_within(objective.tpot_ms / 1e3)
        good = max(good, 0.0)
        share = good / self.calls.count
        wall = self.calls.wall_s
        return Goodput(share, good / wall if wall else 0.0, share >= objective.share)

    def as_json(self, objective: Objective) -> dict[str, Any]:
        """For json.dumps; times are milliseconds unless a name says otherwise."""
        latency, goodput, served = self.calls.latency(self.expected), self.goodput(objective), None
        if self.served is not None:
            served = {
                "tokens": self.served.tokens,
                "acceptance": self.served.figures.acceptance,
                "block_efficiency": self.served.figures.block_efficiency,
                "ttft_buckets_s": {str(le): n for le, n in self.served.ttft.counts.items()},
                "tpot_buckets_s": {str(le): n for le, n in self.served.tpot.counts.items()},
            }
        return {
            "name": self.name,
            "loop": self.loop,
            "statuses": dict(self.calls.statuses),
            "errors": dict(self.calls.errors),
            "wall_s": self.calls.wall_s,
            "latency": latency and asdict(latency),
            "first_message": self.ttft and asdict(self.ttft),
            "served": served,
            "goodput": goodput and asdict(goodput),
            "left_open": self.left_open,
            "faults": self.faults,
        }

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
    """What came of a load.

    Attributes:
        name: of the scenario.
        loop: how calls followed each other.
        calls: as ghz saw them.
        expected: statuses that are no error.
        cuts: whether ghz cancelled the calls itself.
        ttft: of ghz, where it cut calls behind their first message.
        served: by the services' metrics; None without any.
        left_open: texts and sequences that were open some seconds later; None where nobody looked.
        trouble: why the load could not be run, or its metrics not be read.
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
        """Of a scenario that was run."""
        expected = scenario.expected
        ttft = calls.latency(expected) if scenario.first_token_only else None
        return cls(
            *(scenario.name, scenario.loop, calls, expected, scenario.cuts, ttft, served),
            left_open,
        )

    @property
    def failed(self) -> int:
        """Calls that ended with a status that is an error."""
        return self.calls.count - self.calls.ended(self.expected)

    @property
    def faults(self) -> list[str]:
        """What is wrong; nothing, if all is well."""
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
        """What failed calls said, the commonest first."""
        said = [
            f"{count} x {' '.join(error.split())}"
            for error, count in self.calls.errors.items()
            if not (self.cuts and "code = Canceled" in error)
        ]
        further = len(said) - _SHOWN_ERRORS
        return said if further <= 0 else [*said[:_SHOWN_ERRORS], f"and {further} other kinds"]

    def goodput(self, objective: Objective) -> Goodput | None:
        """What surely came within an objective; None where that cannot be told.

        ghz knows each call's latency, the services' histograms how many first tokens and tokens
        were late, but not whose: each counts against another text, and what shares a bucket with
        the limit is late.
        """
        if self.cuts or self.served is None or not self.calls.count:
            return None
        ended = good = float(self.calls.ended((OK,)))
        if objective.latency_ms is not None:
            good -= self.calls.slower(objective.latency_ms / 1e3, (OK,))
        if objective.ttft_ms is not None:
            seen = self.served.ttft
            # A call that ended well and was not observed was not seen to be in time.
            good -= max(seen.count, ended) - seen.surely_within(objective.ttft_ms / 1e3)
        if objective.tpot_ms is not None:
            # A text of one token has none.
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

"""Scenarios run one after the other, with a scrape of the metrics before and after each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tandem.failure import Failure
from tandem.rpc.endpoint import Endpoint
from tandem.tools.load.ghz import tool
from tandem.tools.load.ghz.calls import Calls
from tandem.tools.load.ghz.outcome import Outcome
from tandem.tools.load.ghz.scenario import Scenario
from tandem.tools.load.ghz.served import ServedCounts, Watch

# How long sequences may take to close after a load. A service notices a cancel at once, but does
# not interrupt a running pass, and records a text only after its last message has left.
_SETTLE_SECONDS = 10.0


@dataclass(frozen=True)
class Campaign:
    """What all scenarios of a run share.

    Attributes:
        ghz: the program.
        endpoint: of the orchestrator.
        watch: the services' metrics; None if their endpoints are unknown.
        folder: for ghz's reports.
        flags: of ghz; they override the configurations.
    """

    ghz: str
    endpoint: Endpoint
    watch: Watch | None
    folder: Path
    flags: Mapping[str, str]

    def run(self, scenario: Scenario) -> Outcome:
        """Run a scenario. If that is not possible, the outcome says why."""
        try:
            return self._run(scenario)
        except Failure as failure:
            trouble = ": ".join((str(failure), *failure.details))
            nothing = Calls((), {}, {}, 0.0)
            return Outcome(scenario.name, scenario.loop, nothing, trouble=trouble)

    def _run(self, scenario: Scenario) -> Outcome:
        """Run a scenario.

        Raises:
            Failure: ghz could send no call, or the scrape before it failed.
        """
        report = self.folder / f"{scenario.name}.json"
        before = self.watch.look() if self.watch else {}
        calls = tool.run(self.ghz, scenario, self.endpoint, report, self.flags)
        if self.watch is None:
            return Outcome.of(scenario, calls)
        try:
            left_open = self.watch.left_open(_SETTLE_SECONDS)
            served = ServedCounts.between(before, self.watch.look())
        except Failure as failure:  # a service has died; the calls show how clients saw it
            return replace(Outcome.of(scenario, calls), trouble=str(failure))
        return Outcome.of(scenario, calls, served, left_open)

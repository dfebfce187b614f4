"""Scenarios run one after the other, with a look at the metrics before and after each."""

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

# Cancels are heard at once, and a pass that is under way is not interrupted; a service books a text
# when its last message has left.
_SETTLE_SECONDS = 10.0


@dataclass(frozen=True)
class Campaign:
    """What all scenarios of a run share.

    Attributes:
        ghz: the program.
        endpoint: of the orchestrator.
        watch: the services' metrics; None where nobody knows where they are.
        folder: for ghz's reports.
        flags: of ghz, over what the configurations say.
    """

    ghz: str
    endpoint: Endpoint
    watch: Watch | None
    folder: Path
    flags: Mapping[str, str]

    def run(self, scenario: Scenario) -> Outcome:
        """Run one. Where that is not possible, the outcome says why."""
        try:
            return self._run(scenario)
        except Failure as failure:
            trouble = ": ".join((str(failure), *failure.details))
            nothing = Calls((), {}, {}, 0.0)
            return Outcome(scenario.name, scenario.loop, nothing, trouble=trouble)

    def _run(self, scenario: Scenario) -> Outcome:
        """Run one.

        Raises:
            Failure: ghz could send no call, or there are no metrics before it.
        """
        report = self.folder / f"{scenario.name}.json"
        before = self.watch.look() if self.watch else {}
        calls = tool.run(self.ghz, scenario, self.endpoint, report, self.flags)
        if self.watch is None:
            return Outcome.of(scenario, calls)
        try:
            left_open = self.watch.left_open(_SETTLE_SECONDS)
            served = ServedCounts.between(before, self.watch.look())
        except Failure as failure:  # a service has died, and the calls say what clients saw of it
            return replace(Outcome.of(scenario, calls), trouble=str(failure))
        return Outcome.of(scenario, calls, served, left_open)

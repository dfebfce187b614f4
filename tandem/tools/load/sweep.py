"""The highest rate that holds an objective, found by bisection."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from tandem.failure import Misconfigured
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.tools.load.generator import LoadGenerator
from tandem.tools.load.objective import Goodput, Objective
from tandem.tools.load.report import LoadReport, error_lines
from tandem.tools.load.requests import MAX_IN_FLIGHT, MOST_TEXTS
from tandem.tools.load.timeline import Percentiles, Timeline

# The rate is found to within a tenth: two runs of one rate differ by more.
_CLOSE = 1.1
# Enough for five doublings, then as many bisections. If the start is further off, choose a better
# one.
_MOST_LEVELS = 12


@dataclass(frozen=True)
class Level:
    """A rate, and its results.

    Attributes:
        rate: mean requests a second.
        report: figures.
        goodput: under the objective.
        texts: their timelines.
    """

    rate: float
    report: LoadReport
    goodput: Goodput
    texts: Sequence[Timeline] = field(default=(), repr=False)

    def __str__(self) -> str:
        verdict = "held" if self.goodput.held else "not held"
        return f"{self.rate:.3g} texts/s: {self.goodput.share:.1%} good, {verdict}"

    def as_json(self) -> dict[str, Any]:
        """For json.dumps."""
        return {
            "rate": self.rate,
            "report": self.report.as_json(),
            "goodput": asdict(self.goodput),
            "timelines": [text.as_json() for text in self.texts],
        }


def require_rate(rate: float, seconds: float) -> None:
    """Refuse a run of more texts than are kept.

    Raises:
        Misconfigured: there are too many.
    """
    if not rate * seconds <= MOST_TEXTS:
        raise Misconfigured(
            f"{rate:g} texts a second for {seconds:g} s are too many: at most {MOST_TEXTS} a run"
        )


def failures(levels: Sequence[Level]) -> list[str]:
    """The errors of failed texts over all rates: a line for each kind, the commonest first."""
    errors: Counter[str] = Counter()
    for level in levels:
        errors.update(level.report.errors)
    return error_lines(dict(errors.most_common()))


def best(levels: Sequence[Level]) -> Level | None:
    """The highest rate that held the objective; None if none did."""
    held = [level for level in levels if level.goodput.held]
    return max(held, key=lambda level: level.rate, default=None)


async def sweep(
    measure: Callable[[float], Awaitable[Level]],
    start: float,
    lowest: float = 0.0,
    highest: float = math.inf,
    tell: Callable[[Level], object] = lambda level: None,
) -> list[Level]:
    """Find the highest rate that holds the objective: by factors of two, then by bisection.

    Args:
        measure: runs a load at a rate.
        start: the first rate, texts a second.
        lowest: lowest rate that is worth a run.
        highest: highest rate that can be run.
        tell: is called with each rate that has been run.

    Returns:
        All rates that were run, in order. The sweep ends early if no text of a run succeeded,
        after the twelfth run, and if the next rate would be below `lowest` or above `highest`.
    """
    levels: list[Level] = []
    held = failed = None
    rate = start
    while len(levels) < _MOST_LEVELS:
        level = await measure(rate)
        levels.append(level)
        tell(level)
        if level.goodput.held:
            held = rate
        else:
            failed = rate
        if not level.report.texts:
            break
        if held is None:
            rate /= 2
            if rate < lowest:
                break
        elif failed is None:
            rate *= 2
            if rate > highest:
                break
        elif failed <= held * _CLOSE:
            break
        else:
            rate = float((held * failed) ** 0.5)
    return levels


@dataclass(frozen=True)
class OpenLoop:
    """One kind of load, to be run at one rate after the other.

    Attributes:
        generator: runs the load.
        request: makes a request from its number.
        seconds: how long requests are sent at a rate; a run ends when its last text has.
        objective: for the goodput.
        seed: of the gaps.
        max_in_flight: most texts in flight.
    """

    generator: LoadGenerator
    request: Callable[[int], pb.Generation]
    seconds: float
    objective: Objective
    seed: int = 0
    max_in_flight: int = MAX_IN_FLIGHT

    @property
    def lowest(self) -> float:
        """The rate of one text per run: at a lower one, a run would last longer than `seconds`."""
        return 1 / self.seconds

    @property
    def highest(self) -> float:
        """The rate of the most texts that a run may have."""
        return MOST_TEXTS / self.seconds

    async def level(self, rate: float) -> Level:
        """Run a rate."""
        count = max(math.ceil(rate * self.seconds), 1)
        texts = await self.generator.open_loop(
            [self.request(number) for number in range(count)],
            rate,
            self.seed,
            max_in_flight=self.max_in_flight,
        )
        return Level(rate, LoadReport.of(texts), self.objective.goodput(texts), texts)


HEADS = (
    *("texts/s", "texts", "failed", "tokens/s", "TTFT p50", "p99 ms", "TPOT p50", "p99 ms"),
    *("good", "goodput/s", "held"),
)


def rows(levels: Sequence[Level]) -> list[tuple[str, ...]]:
    """A row per rate, the lowest first, with the columns of `HEADS`."""
    found: list[tuple[str, ...]] = []
    for level in sorted(levels, key=lambda level: level.rate):
        report, goodput = level.report, level.goodput
        row = (
            f"{level.rate:.3g}",
            str(report.texts),
            str(sum(report.errors.values())),
            f"{report.tokens_per_s:.0f}",
            *_ends(report.ttft),
            *_ends(report.tpot),
            f"{goodput.share:.1%}",
            f"{goodput.texts_per_s:.2f}",
            "yes" if goodput.held else "no",
        )
        found.append(row)
    return found


def table(levels: Sequence[Level]) -> Table:
    """For a terminal."""
    found = Table(*HEADS)
    for row in rows(levels):
        found.add_row(*row)
    return found


def _ends(times: Percentiles | None) -> tuple[str, str]:
    return (f"{times.p50:.1f}", f"{times.p99:.1f}") if times else ("-", "-")

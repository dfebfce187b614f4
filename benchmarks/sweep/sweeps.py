"""The sweeps of a full run, over parameters that are fixed in the headline table."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from rich.progress import Progress
from rich.table import Table

from benchmarks.measure.tables import table_of
from benchmarks.measure.texts import PROMPTS
from benchmarks.sweep.concurrency import Load, concurrency_sweep
from benchmarks.sweep.expectation import Expectation, expectations
from benchmarks.sweep.network_delay import Delayed, delay_sweep
from benchmarks.sweep.recorded import Recorder
from benchmarks.sweep.support_size import SupportSize, support_sizes
from tandem.tools.load.timeline import Percentiles
from tandem.tools.local.pair import embedded

_Found = TypeVar("_Found")
# For each column's head, the function that gives a finding's cell.
_Columns = Mapping[str, Callable[[_Found], str]]


@dataclass(frozen=True)
class Sweeps:
    """How much to measure.

    Attributes:
        levels: of concurrency.
        new_tokens: of each text under load.
        delays_ms: added to each hop.
        delayed_texts: texts at each delay, one after another.
        prompts: number of prompts of the recorded texts.
        samples: texts of each prompt.
        recorded_tokens: new tokens of each of these texts.
        gammas: of the exact expectations.
    """

    levels: tuple[int, ...]
    new_tokens: int
    delays_ms: tuple[float, ...]
    delayed_texts: int
    prompts: int
    samples: int
    recorded_tokens: int
    gammas: tuple[int, ...] = (4, 8)


FULL = Sweeps(
    levels=(1, 2, 4, 8, 16, 32),
    new_tokens=64,
    delays_ms=(0, 1, 5, 20),
    delayed_texts=4,
    prompts=len(PROMPTS),
    samples=64,
    recorded_tokens=96,
)
QUICK = Sweeps(
    levels=(2,),
    new_tokens=8,
    delays_ms=(0, 5),
    delayed_texts=1,
    prompts=2,
    samples=4,
    recorded_tokens=12,
)


@dataclass(frozen=True)
class Findings:
    """The results of the sweeps."""

    support_size: list[SupportSize]
    exact_block_efficiency: list[Expectation]
    concurrency: list[Load]
    network_delay: list[Delayed]

    def as_json(self) -> dict[str, list[dict[str, Any]]]:
        """For json.dumps, with a list for each sweep."""
        return asdict(self)

    def tables(self) -> list[Table]:
        """One table for each sweep."""
        positions, rounds = self.support_size[0].positions, self.exact_block_efficiency[0].rounds
        supports = f"Support size on {positions} recorded positions, gamma 4"
        expected = f"Exact expected block efficiency on {rounds} recorded rounds, temperature 1"
        loads = "Load, gamma 4 and plain, temperature 1; latencies from the intended start"
        delays = "Added network delay, one sequence, temperature 1"
        return [
            _table(supports, self.support_size, _SUPPORTS),
            _table(expected, self.exact_block_efficiency, _EXPECTED),
            _table(loads, self.concurrency, _LOADS),
            _table(delays, self.network_delay, _DELAYS),
        ]


def run_sweeps(sweeps: Sweeps, addresses: Mapping[str, str], progress: Progress) -> Findings:
    """Run all of them, one after the other.

    Args:
        sweeps: how much to measure.
        addresses: of running services, for the sweeps that load them.
        progress: gets the bars.
    """
    recorder = Recorder(embedded("drafter"), embedded("target"))
    prompts = PROMPTS[: sweeps.prompts]
    texts = list(recorder.texts(prompts, sweeps.samples, sweeps.recorded_tokens, progress))
    supports = support_sizes(recorder, texts)
    expected = expectations(recorder, texts, sweeps.gammas)
    loads, delays = asyncio.run(_served(sweeps, addresses, progress))
    return Findings(supports, expected, loads, delays)


async def _served(
    sweeps: Sweeps, addresses: Mapping[str, str], progress: Progress
) -> tuple[list[Load], list[Delayed]]:
    loads = await concurrency_sweep(addresses, sweeps.levels, sweeps.new_tokens, progress)
    delays = await delay_sweep(
        addresses, sweeps.delays_ms, sweeps.delayed_texts, sweeps.new_tokens, progress
    )
    return loads, delays


def _table(title: str, found: Sequence[_Found], columns: _Columns[_Found]) -> Table:
    """A table with a row for each finding."""
    return table_of(({name: told(each) for name, told in columns.items()} for each in found), title)


def _ends(name: str, times: Callable[[_Found], Percentiles | None]) -> _Columns[_Found]:
    """Two columns, p50 and p99."""

    def at(percentile: str) -> Callable[[_Found], str]:
        def told(each: _Found) -> str:
            found = times(each)
            return f"{getattr(found, percentile):.1f}" if found else "-"

        return told

    return {f"{name} p50": at("p50"), f"{name} p99": at("p99")}


_SUPPORTS: _Columns[SupportSize] = {
    "support": lambda each: str(each.support or "full"),
    "overlap": lambda each: f"{each.overlap:.4f}",
    "overlap lost": lambda each: f"{each.overlap_lost:.3%}",
    "bytes a round": lambda each: f"{each.bytes_a_round:.0f}",
}
_EXPECTED: _Columns[Expectation] = {
    "gamma": lambda each: str(each.gamma),
    "token": lambda each: f"{each.token:.4f} ± {each.token_se:.4f}",
    "block": lambda each: f"{each.block:.4f} ± {each.block_se:.4f}",
    "block / token": lambda each: f"{each.block_to_token:.4f} ± {each.block_to_token_se:.4f}",
}
_LOADS: _Columns[Load] = {
    "loop": lambda each: each.loop,
    "verifier": lambda each: each.method,
    "clients": lambda each: str(each.concurrency),
    "texts/s asked": lambda each: "-" if each.rate is None else f"{each.rate:.2f}",
    "tokens/s": lambda each: f"{each.report.tokens_per_s:.1f}",
    "target passes\na round": lambda each: f"{each.passes_per_round:.2f}",
    **_ends("TTFT", lambda each: each.report.ttft),
    **_ends("TPOT", lambda each: each.report.tpot),
    **_ends("round", lambda each: each.report.round),
    "errors": lambda each: str(sum(each.report.errors.values())),
}
_DELAYS: _Columns[Delayed] = {
    "delay a hop, ms": lambda each: f"{each.delay_ms:g}",
    "verifier": lambda each: each.method,
    "gamma": lambda each: str(each.gamma),
    "tokens/s": lambda each: f"{each.report.tokens_per_s:.1f}",
    **_ends("TPOT", lambda each: each.report.tpot),
    **_ends("round", lambda each: each.report.round),
}

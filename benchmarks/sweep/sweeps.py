"""The sweeps of a full run: what the headline table holds fixed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.progress import Progress
from rich.table import Table

from benchmarks.measure.texts import PROMPTS
from benchmarks.sweep.concurrency import Load, concurrency_sweep
from benchmarks.sweep.expectation import Expectation, expectations
from benchmarks.sweep.network_delay import Delayed, delay_sweep
from benchmarks.sweep.recorded import Recorder
from benchmarks.sweep.support_size import SupportSize, support_sizes
from tandem.tools.load.timeline import Percentiles
from tandem.tools.local.pair import embedded


@dataclass(frozen=True)
class Sweeps:
    """How much to measure.

    Attributes:
        levels: of concurrency.
        new_tokens: of each text under load.
        delays_ms: added to each hop.
        delayed_texts: one after another, at each delay.
        prompts: of the recorded texts.
        samples: texts of each prompt.
        recorded_tokens: new tokens of each of them.
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
    """What the sweeps found."""

    support_size: list[SupportSize]
    exact_block_efficiency: list[Expectation]
    concurrency: list[Load]
    network_delay: list[Delayed]

    def as_json(self) -> dict[str, list[dict[str, Any]]]:
        """For json.dumps, a list a sweep."""
        return asdict(self)

    def tables(self) -> list[Table]:
        """One a sweep."""
        return [
            _supports(self.support_size),
            _expected(self.exact_block_efficiency),
            _loads(self.concurrency),
            _delays(self.network_delay),
        ]


def run_sweeps(sweeps: Sweeps, addresses: Mapping[str, str], progress: Progress) -> Findings:
    """Run all of them, one after the other.

    Args:
        sweeps: how much to measure.
        addresses: of running services, for what runs through them.
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


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(*columns, title=title)
    for column in table.columns:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    return table


def _supports(found: Sequence[SupportSize]) -> Table:
    return _table(
        f"Support size on {found[0].positions} recorded positions, gamma 4",
        ("support", "overlap", "overlap lost", "bytes a round"),
        (
            (
                str(each.support or "full"),
                f"{each.overlap:.4f}",
                f"{each.overlap_lost:.3%}",
                f"{each.bytes_a_round:.0f}",
            )
            for each in found
        ),
    )


def _expected(found: Sequence[Expectation]) -> Table:
    return _table(
        f"Exact expected block efficiency on {found[0].rounds} recorded rounds, temperature 1",
        ("gamma", "token", "block", "block / token"),
        (
            (
                str(each.gamma),
                f"{each.token:.4f} ± {each.token_se:.4f}",
                f"{each.block:.4f} ± {each.block_se:.4f}",
                f"{each.block_to_token:.4f} ± {each.block_to_token_se:.4f}",
            )
            for each in found
        ),
    )


def _loads(found: Sequence[Load]) -> Table:
    return _table(
        "Load, gamma 4 and plain, temperature 1; latencies from the intended start",
        ("loop", "verifier", "clients", "texts/s asked", "tokens/s", "target passes\na round",
         "TTFT p50", "p99", "TPOT p50", "p99", "round p50", "p99", "errors"),
        (
            (
                each.loop,
                each.method,
                str(each.concurrency),
                "-" if each.rate is None else f"{each.rate:.2f}",
                f"{each.report.tokens_per_s:.1f}",
                f"{each.passes_per_round:.2f}",
                *_ends(each.report.ttft),
                *_ends(each.report.tpot),
                *_ends(each.report.round),
                str(sum(each.report.errors.values())),
            )
            for each in found
        ),
    )  # fmt: skip


def _delays(found: Sequence[Delayed]) -> Table:
    return _table(
        "Added network delay, one sequence, temperature 1",
        ("delay a hop, ms", "verifier", "gamma", "tokens/s", "TPOT p50", "p99",
         "round p50", "p99"),
        (
            (
                f"{each.delay_ms:g}",
                each.method,
                str(each.gamma),
                f"{each.report.tokens_per_s:.1f}",
                *_ends(each.report.tpot),
                *_ends(each.report.round),
            )
            for each in found
        ),
    )  # fmt: skip


def _ends(times: Percentiles | None) -> tuple[str, str]:
    return (f"{times.p50:.1f}", f"{times.p99:.1f}") if times else ("-", "-")

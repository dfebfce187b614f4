"""Drafting ahead on simulated devices: what two GPUs in two zones would gain. Where drafter and
target share two cores, nothing overlaps.

    python -m benchmarks.ahead [--texts 1 16] [--delays 0.2 1 5 20] [--temperatures 0 1]

A pass of the target takes 25 ms, a step of the drafter 3 ms, however many rows it has; each way
over the network takes a delay. The same texts are served in turn by a stack whose drafter prepares
drafts, and by one whose drafter does not.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory, mkdtemp

from rich.console import Console
from rich.progress import Progress

from benchmarks.measure.environment import RESULTS, keep
from benchmarks.measure.services import serving
from benchmarks.measure.tables import table_of
from benchmarks.measure.texts import asked
from benchmarks.simulated.device import variables
from benchmarks.sweep.delay_proxy import DelayProxy
from tandem.tools.load.generator import LoadGenerator
from tandem.tools.load.report import LoadReport
from tandem.tools.local.pair import Pair
from tandem.tools.local.stack import Stack, StackSettings
from tandem.tools.traces.prediction.basis import Basis
from tandem.tools.traces.prediction.whatif import Outlook
from tandem.tools.traces.read.recording import Recording
from tandem.tools.watch.scrape import Scrape, scrape

TARGET_MS, STEP_MS = 25.0, 3.0
CAME = "tandem_drafts_ahead_total"
# Spans are in their file within a second.
_WRITTEN_SECONDS = 2.0


@dataclass(frozen=True)
class Row:
    """One load, without prepared drafts and with them.

    Attributes:
        delay_ms: each way between services.
        texts: at once.
        temperature: see there.
        gamma: draft length; "auto" where it is chosen.
        tokens_per_s: without prepared drafts.
        speedup: with them: median of the turns' ratios.
        by_hits: what the hits should give, each of which saves a draft's steps and the way to the
            drafter and back.
        what_if: what `tandem trace what-if` predicts from the texts without prepared drafts.
        hits: share of drafts that were ready.
        late: share that was being made.
        same: whether the texts kept as many drafted tokens of each place.
    """

    delay_ms: float
    texts: int
    temperature: float
    gamma: str
    tokens_per_s: float
    speedup: float
    by_hits: float
    what_if: float
    hits: float
    late: float
    same: bool


@dataclass
class Lane:
    """A stack behind a network, with its trace files in a folder."""

    proxies: tuple[DelayProxy, DelayProxy]
    generator: LoadGenerator
    metrics: str
    traces: Path

    async def run(
        self, texts: int, temperature: float, gamma: int | None, tokens: int
    ) -> tuple[LoadReport, list[list[int]]]:
        """A load, and how often each text kept a token of each place."""
        wanted = [asked(seed, tokens, temperature) for seed in range(max(texts, 4))]
        for each in wanted:
            if gamma is not None:
                each.speculation.gamma = gamma
        timelines = await self.generator.closed_loop(wanted, texts)
        report = LoadReport.of(timelines)
        assert not report.errors, report.errors
        return report, [
            list(each.summary.accepted_per_position) for each in timelines if each.summary
        ]

    async def scraped(self) -> Scrape:
        return await asyncio.to_thread(scrape, self.metrics, 10.0)

    def marks(self) -> dict[Path, int]:
        """How much is recorded."""
        return {path: path.stat().st_size for path in self.traces.glob("*.jsonl")}

    async def ahead_by_what_if(self, before: Mapping[Path, int]) -> float:
        """The factor predicted for drafting ahead by what was recorded since; 0 for none."""
        await asyncio.sleep(_WRITTEN_SECONDS)
        with TemporaryDirectory() as folder:
            for path, start in before.items():
                (Path(folder) / path.name).write_bytes(path.read_bytes()[start:])
            changes = Outlook(Basis(Recording([folder]), None, None)).changes
        factors = [one.factor for one in changes if one.change.startswith("drafting ahead")]
        return factors[0] or 0.0 if factors else 0.0


@asynccontextmanager
async def _lane(ahead: int) -> AsyncIterator[Lane]:
    """The embedded pair on simulated devices, and an orchestrator behind proxies."""
    # Two that compute alike, and with branches: a seed then has one text in both.
    one = {"THREADS": "1", "ENGINE": "torch", "DTYPE": "float32"}
    traces = Path(mkdtemp())
    files = {
        name: {"TRACE_FILE": str(traces / f"{name}.jsonl")}
        for name in ("drafter", "target", "orchestrator")
    }
    more = {
        "drafter": {**one, **files["drafter"], "AHEAD": str(ahead)},
        "target": {**one, **files["target"]},
    }
    modules = {service: f"benchmarks.simulated.{service}" for service in more}
    async with AsyncExitStack() as stack:
        served = stack.enter_context(serving(Pair(), more, modules=modules))
        drafter, target = [
            await stack.enter_async_context(DelayProxy(served.addresses[name]).serving())
            for name in ("drafter", "target")
        ]
        stack.callback(shutil.rmtree, traces)
        peers = {"DRAFTERS": drafter.address, "TARGETS": target.address, **files["orchestrator"]}
        own = {"LISTEN": "127.0.0.1:0", "METRICS_LISTEN": "127.0.0.1:0", "DRAIN_SECONDS": "2"}
        front = Stack(StackSettings({"orchestrator": {**own, **peers}}))
        await asyncio.to_thread(front.start)
        stack.push_async_callback(asyncio.to_thread, front.drain)
        generator = LoadGenerator(front.addresses["orchestrator"])
        await stack.enter_async_context(generator)
        metrics = front.further_addresses("METRICS_LISTEN")["orchestrator"]
        yield Lane((drafter, target), generator, metrics, traces)


async def _measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    os.environ |= variables("target", TARGET_MS, 0.0) | variables("drafter", STEP_MS, 0.0)
    kinds = [
        (delay, texts, temperature, gamma)
        for delay in options.delays
        for texts in options.texts
        for temperature in options.temperatures
        for gamma in options.gammas
    ]
    bar = progress.add_task("loads", total=len(kinds))
    rows = []
    async with _lane(0) as plain, _lane(options.ahead) as ahead:
        for delay, texts, temperature, gamma in kinds:
            for proxy in (*plain.proxies, *ahead.proxies):
                proxy.delay_s = delay / 1e3
            size = None if gamma == "auto" else int(gamma)
            load = texts, temperature, size, options.tokens
            for lane in (plain, ahead):
                await lane.run(*load)  # sizes, and the way to prepare, are learnt
            before, marks, speeds, same = await ahead.scraped(), plain.marks(), [], True
            for _ in range(options.turns):
                (alone, expected), (report, found) = await plain.run(*load), await ahead.run(*load)
                speeds.append((alone.tokens_per_s, report.tokens_per_s / alone.tokens_per_s))
                same &= found == expected
            came = (await ahead.scraped()).since(before)
            hits, late, miss = (came.value(CAME, outcome=one) for one in ("hit", "late", "miss"))
            drafts = max(hits + late + miss, 1.0)
            assert alone.round is not None
            saved = (size or 0) * STEP_MS + 2 * delay
            wall = alone.round.p50
            rows.append(
                Row(
                    *(delay, texts, temperature, str(gamma)),
                    tokens_per_s=median(speed for speed, _ in speeds),
                    speedup=median(ratio for _, ratio in speeds),
                    by_hits=wall / (wall - hits / drafts * saved) if size else 0.0,
                    what_if=await plain.ahead_by_what_if(marks) if size else 0.0,
                    hits=hits / drafts,
                    late=late / drafts,
                    same=same,
                )
            )
            progress.advance(bar)
    return rows


def main() -> None:
    """Measure, print and write benchmarks/results/ahead.json."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--texts", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--delays", type=float, nargs="+", default=[0.2, 1.0, 5.0, 20.0])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--gammas", nargs="+", default=["4", "auto"], help="lengths, or auto")
    parser.add_argument("--ahead", type=int, default=64, help="drafted tokens prepared a round")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    with Progress(transient=True) as progress:
        rows = asyncio.run(_measure(options, progress))
    Console(width=140).print(table_of(map(asdict, rows)))
    keep(RESULTS / "ahead.json", options=vars(options), rows=[asdict(row) for row in rows])


if __name__ == "__main__":
    main()

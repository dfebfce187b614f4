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
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.measure.environment import RESULTS, keep
from benchmarks.measure.services import serving
from benchmarks.measure.tables import table_of
from benchmarks.measure.texts import asked, token_ids
from benchmarks.overhead import save_pair
from benchmarks.simulated.device import variables
from benchmarks.sweep.delay_proxy import DelayProxy
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.tools.load.generator import LoadGenerator
from tandem.tools.load.report import LoadReport
from tandem.tools.local.pair import Pair
from tandem.tools.local.stack import Stack, StackSettings
from tandem.tools.traces.prediction.basis import Basis
from tandem.tools.traces.prediction.whatif import Outlook
from tandem.tools.traces.read.recording import Recording
from tandem.tools.watch.scrape import Scrape, scrape

PASS_MS = {"drafter": 3.0, "target": 25.0}
CAME = "tandem_drafts_ahead_total"
_USUAL = ("embedded", "simulated")
# Spans are in their file within a second.
_WRITTEN_SECONDS = 2.0


@dataclass(frozen=True)
class Row:
    """One load, without prepared drafts and with them.

    Attributes:
        delay_ms: each way between services.
        texts: at once.
        temperature: of the sampling.
        gamma: draft length; "auto" where it is chosen.
        tokens_per_s: without prepared drafts; so are the next two.
        tokens_a_round: of rounds with a draft.
        round_ms: mean.
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
    tokens_a_round: float
    round_ms: float
    speedup: float
    by_hits: float
    what_if: float
    hits: float
    late: float
    same: bool


@dataclass
class Front:
    """An orchestrator, and what it has recorded."""

    generator: LoadGenerator
    metrics: str
    traces: Path

    async def run(
        self, wanted: Sequence[pb.Generation], texts: int
    ) -> tuple[LoadReport, list[list[int]]]:
        """A load, and how often each text kept a token of each place."""
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


@dataclass
class Lane:
    """A drafter and a target on simulated devices, across a network; with their trace files."""

    drafter: DelayProxy
    target: DelayProxy
    traces: Path

    @asynccontextmanager
    async def front(self) -> AsyncIterator[Front]:
        """An orchestrator that has learnt nothing yet."""
        peers = {"DRAFTERS": self.drafter.address, "TARGETS": self.target.address}
        own = {"LISTEN": "127.0.0.1:0", "METRICS_LISTEN": "127.0.0.1:0", "DRAIN_SECONDS": "2"}
        traced = {"TRACE_FILE": str(self.traces / "orchestrator.jsonl")}
        stack = Stack(StackSettings({"orchestrator": {**own, **peers, **traced}}))
        await asyncio.to_thread(stack.start)
        try:
            metrics = stack.further_addresses("METRICS_LISTEN")["orchestrator"]
            async with LoadGenerator(stack.addresses["orchestrator"]) as generator:
                yield Front(generator, metrics, self.traces)
        finally:
            await asyncio.to_thread(stack.drain)


@asynccontextmanager
async def _lane(pair: Pair, ahead: int, simulated: bool) -> AsyncIterator[Lane]:
    # Two that compute alike, and with branches: a seed then has one text in both.
    alike = {"THREADS": "1", "ENGINE": "torch", "DTYPE": "float32"}
    one = alike if simulated else {}
    async with AsyncExitStack() as stack:
        traces = Path(stack.enter_context(TemporaryDirectory()))
        files = {name: {"TRACE_FILE": str(traces / f"{name}.jsonl")} for name in PASS_MS}
        more = {name: {**one, **files[name]} for name in PASS_MS}
        more["drafter"]["AHEAD"] = str(ahead)
        modules = {service: f"benchmarks.simulated.{service}" for service in PASS_MS if simulated}
        served = stack.enter_context(serving(pair, more, modules=modules))
        proxies = {
            name: await stack.enter_async_context(DelayProxy(served.addresses[name]).serving())
            for name in PASS_MS
        }
        yield Lane(proxies["drafter"], proxies["target"], traces)


def _wanted(options: argparse.Namespace, texts: int, temperature: float, gamma: str) -> list[Any]:
    """Requests of a load."""
    found = []
    for seed in range(max(texts, 4)):
        prompt = token_ids(seed, 8) if options.pair == "tiny" else None
        each = asked(seed, options.tokens, temperature, prompt)
        if gamma != "auto":
            each.speculation.gamma = int(gamma)
        found.append(each)
    return found


async def _row(
    plain: Front, ahead: Front, options: argparse.Namespace, kind: tuple[float, int, float, str]
) -> Row:
    """A load, by both in turn."""
    delay, texts, temperature, gamma = kind
    wanted = _wanted(options, texts, temperature, gamma)
    for front in (plain, ahead):
        for _ in range(2):
            await front.run(wanted, texts)  # sizes, and the way to prepare, are learnt
    before, marks, speeds, same = await ahead.scraped(), plain.marks(), [], True
    for _ in range(options.turns):
        (alone, expected), (report, found) = (
            await plain.run(wanted, texts),
            await ahead.run(wanted, texts),
        )
        speeds.append((alone.tokens_per_s, report.tokens_per_s / alone.tokens_per_s))
        same &= found == expected
    came = (await ahead.scraped()).since(before)
    hits, late, miss = (came.value(CAME, outcome=one) for one in ("hit", "late", "miss"))
    drafts = max(hits + late + miss, 1.0)
    assert alone.round is not None
    fixed = gamma != "auto"
    saved = int(gamma) * PASS_MS["drafter"] + 2 * delay if fixed else 0.0
    return Row(
        *kind,
        tokens_per_s=median(speed for speed, _ in speeds),
        tokens_a_round=alone.block_efficiency,
        round_ms=alone.round.mean,
        speedup=median(ratio for _, ratio in speeds),
        by_hits=alone.round.mean / (alone.round.mean - hits / drafts * saved) if fixed else 0.0,
        what_if=await plain.ahead_by_what_if(marks) if fixed else 0.0,
        hits=hits / drafts,
        late=late / drafts,
        same=same,
    )


async def _measure(options: argparse.Namespace, progress: Progress, folder: Path) -> list[Row]:
    for service, milliseconds in PASS_MS.items():
        os.environ |= variables(service, milliseconds, 0.0)
    pair = Pair()
    if options.pair == "tiny":
        models = save_pair(folder)
        pair = Pair(str(models["target"]), str(models["drafter"]), max_length=512)
    kinds = [
        (delay, texts, temperature, str(gamma))
        for delay in options.delays
        for texts in options.texts
        for temperature in options.temperatures
        for gamma in options.gammas
    ]
    bar = progress.add_task("loads", total=len(kinds))
    rows = []
    simulated = options.devices == "simulated"
    async with (
        _lane(pair, 0, simulated) as plain,
        _lane(pair, options.ahead, simulated) as ahead,
    ):
        for kind in kinds:
            for proxy in (plain.drafter, plain.target, ahead.drafter, ahead.target):
                proxy.delay_s = kind[0] / 1e3
            async with plain.front() as without, ahead.front() as with_:
                rows.append(await _row(without, with_, options, kind))
            progress.advance(bar)
    return rows


def main() -> None:
    """Measure, print and write benchmarks/results/ahead.json."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--texts", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--delays", type=float, nargs="+", default=[0.2, 1.0, 5.0, 20.0])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--gammas", nargs="+", default=["4", "auto"], help="lengths, or auto")
    parser.add_argument(
        "--pair",
        choices=("embedded", "tiny"),
        default="embedded",
        help="tiny models leave the machine's cores to many texts",
    )
    parser.add_argument(
        "--devices",
        choices=("simulated", "real"),
        default="simulated",
        help="real: this machine's, which drafter and target share",
    )
    parser.add_argument("--ahead", type=int, default=64, help="drafted tokens prepared a round")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    with Progress(transient=True) as progress, TemporaryDirectory() as folder:
        rows = asyncio.run(_measure(options, progress, Path(folder)))
    Console(width=160).print(table_of(map(asdict, rows)))
    others = [each for each in (options.pair, options.devices) if each not in _USUAL]
    name = "-".join(["ahead", *others]) + ".json"
    keep(RESULTS / name, options=vars(options), rows=[asdict(row) for row in rows])


if __name__ == "__main__":
    main()

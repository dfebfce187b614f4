"""python -m tests.faults: kills, stops and drains under load, drawn from a seed.

`--seed` and `--start` resume a run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.faults.campaign.fleet import fleet_of
from tests.faults.campaign.load import Load
from tests.faults.campaign.walk import Moment, Walk
from tests.support.models.tiny import save_random_llama

VOCAB_SIZE = 31
# Between two looks at what is still open, for which all texts have to end.
_ROUND = 25
_SMALL_CACHE = "400"


def quantile(values: Sequence[float], share: float) -> float:
    """Of sorted or unsorted values; the next larger one that was seen."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


async def _walk(options: argparse.Namespace, console: Console, folder: Path) -> bool:
    models = {
        role: save_random_llama(folder / role, seed, VOCAB_SIZE)
        for role, seed in (("drafter", 2), ("target", 1))
    }
    recoveries: dict[str, list[float]] = {}
    leaked = 0
    started = time.monotonic()
    index, end = options.start, options.start + options.moments
    logs = Path(options.logs) if options.logs else folder
    logs.mkdir(parents=True, exist_ok=True)
    more: dict[str, Any] = {}
    if options.overcommit > 1:
        more["pods_have"] = {"OVERCOMMIT": str(options.overcommit), "CACHE_TOKENS": _SMALL_CACHE}
    async with fleet_of(models, logs, options.each, **more) as fleet:
        load = Load(fleet.stub, tokens=options.tokens)
        await load.learn()
        walk = Walk(fleet, load)
        while index < end and time.monotonic() - started < options.seconds:
            async with load.running():
                for _ in range(min(_ROUND, end - index)):
                    moment = Moment.drawn(options.seed, index)
                    failed = len(load.outcome.failed) + len(load.outcome.wrong)
                    seconds = await walk.step(moment)
                    recoveries.setdefault(f"{moment.number.name} {moment.role}", []).append(seconds)
                    bad = len(load.outcome.failed) + len(load.outcome.wrong) - failed
                    if bad or options.verbose:
                        told = [*load.outcome.failed[-1:], *load.outcome.wrong[-1:]] if bad else []
                        console.print(f"{index}: {moment}: {seconds:.3f} s, {bad} bad", *told)
                    index += 1
                await walk.settle()
            leaked += await fleet.leaked()
            outcome = load.outcome
            console.print(
                f"{index - options.start} moments, {time.monotonic() - started:.0f} s:"
                f" {outcome.texts} texts right, {len(outcome.failed)} failed,"
                f" {len(outcome.wrong)} wrong, {outcome.undrafted} lost a drafter,"
                f" {outcome.given_back} given back, {leaked} leaked"
            )
    everything = [seconds for values in recoveries.values() for seconds in values]
    for name, values in sorted({**recoveries, "all": everything}.items()):
        console.print(
            f"{name}: {len(values)} moments, recovery p50 {quantile(values, 0.5):.3f} s,"
            f" p99 {quantile(values, 0.99):.3f} s, most {max(values, default=0):.3f} s"
        )
    if options.out:
        report = {
            "seed": options.seed,
            "start": options.start,
            "moments": index - options.start,
            "seconds": round(time.monotonic() - started),
            "texts": outcome.texts,
            "failed": outcome.failed,
            "wrong": outcome.wrong,
            "undrafted": outcome.undrafted,
            "given_back": outcome.given_back,
            "leaked": leaked,
            "recovery_s": {name: [round(s, 4) for s in v] for name, v in recoveries.items()},
        }
        options.out.write(json.dumps(report, indent=1) + "\n")
    console.print(f"go on with --seed {options.seed} --start {index}")
    return not (outcome.failed or outcome.wrong or leaked)


def main() -> None:
    """Exit code 1 if a text failed or was wrong, or a sequence leaked."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--moments", type=int, default=1200, help="how many faults")
    parser.add_argument("--seconds", type=float, default=3600.0, help="how long at most")
    parser.add_argument("--start", type=int, default=0, help="number of the first fault")
    parser.add_argument("--each", type=int, default=3, help="drafters, and targets")
    parser.add_argument("--tokens", type=int, default=48, help="of a text")
    parser.add_argument(
        "--overcommit",
        type=float,
        default=1.0,
        help="of services whose caches hold 400 tokens; texts need more than 64 to be given back",
    )
    parser.add_argument("--out", type=argparse.FileType("w"), help="write a report as JSON")
    parser.add_argument("--logs", default="", help="folder for the services' logs")
    parser.add_argument("--verbose", action="store_true", help="tell of each fault")
    options = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"seed {options.seed}, moments {options.start} and on")
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.setdefault("XDG_CACHE_HOME", scratch)
        sound = asyncio.run(_walk(options, console, Path(scratch)))
    sys.exit(0 if sound else 1)


if __name__ == "__main__":
    main()

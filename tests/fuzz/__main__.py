"""python -m tests.fuzz: mutated messages, drawn from a seed, for all code that reads messages."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
import torch
from rich.console import Console
from rich.progress import Progress
from transformers.utils.logging import disable_progress_bar

from tests.fuzz.kept import FOUND, keep
from tests.fuzz.read.surface import Surface, Violation
from tests.fuzz.read.surfaces import SURFACES
from tests.fuzz.streams import walk

# Beside the surfaces that take bytes: requests of a walk, and its share of all.
STREAMS, STREAMS_SHARE, STEPS = "streams", 0.002, 30
# What differs between two sentences of one kind.
_NUMBER = re.compile(r"-?\b[\d.e+-]+|inf|nan|'[^']*'|\[.*\]", re.DOTALL)


class Run:
    """Messages so far.

    Attributes:
        statuses: what came of them, by surface.
        violations: a sentence each.

    Args:
        seed: of all messages.
        distil: keep the shortest message of each kind of answer for the corpus.
    """

    def __init__(self, seed: int, distil: bool = False) -> None:
        self.statuses: dict[str, Counter[str]] = {}
        self.violations: list[str] = []
        self._seed = seed
        self._distil = distil

    async def go_through(self, surface: Surface, indices: Iterator[int]) -> None:
        """Give a surface its messages; the i-th is a function of the seed and i alone."""
        counts = self.statuses.setdefault(surface.name, Counter())
        kinds: dict[str, tuple[str, bytes]] = {}
        await surface.start()
        try:
            for index in indices:
                data = surface.draw(random.Random(f"{self._seed} {surface.name} {index}"))
                try:
                    status = await surface.check(data)
                except Violation as violation:
                    status = "VIOLATION"
                    self._tell(f"{surface.name} {index}", surface.name, violation)
                counts[status] += 1
                kind = f"{status} {_NUMBER.sub('#', surface.sentence)}"
                if kind not in kinds or len(data) < len(kinds[kind][1]):
                    kinds[kind] = status, data
        finally:
            try:
                await surface.stop()
            except Violation as violation:
                self._tell(surface.name, surface.name, violation)
        if self._distil:
            for status, data in kinds.values():
                keep(surface.name, status, data)

    def _tell(self, where: str, name: str, violation: Violation) -> None:
        kept = keep(name, FOUND, violation.data)
        self.violations.append(f"{where}: {violation} ({kept})")


def _counted(options: argparse.Namespace, surface: Surface, bar: Progress) -> Iterator[int]:
    """The indices of a surface's messages, until its share of the time is over."""
    count = max(round(options.messages * surface.share), 1)
    end = time.monotonic() + options.seconds * surface.share
    task = bar.add_task(surface.name, total=count)
    for index in range(options.start, options.start + count):
        if time.monotonic() > end and options.seconds:
            return
        yield index
        bar.advance(task)


@contextmanager
def _quiet() -> Iterator[None]:
    """Tiny models, by torch and one thread; what services keep goes with them, and they log errors
    alone."""
    torch.set_num_threads(1)
    disable_progress_bar()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["XDG_CACHE_HOME"] = scratch
        for service in ("DRAFTER", "TARGET"):
            os.environ[f"TANDEM_{service}_ENGINE"] = "torch"
            os.environ[f"TANDEM_{service}_DTYPE"] = "float32"
        yield


def _walked(options: argparse.Namespace, run: Run) -> None:
    """The streams' part of a run: so many requests, in walks of some steps each."""
    walks = max(round(options.messages * STREAMS_SHARE / STEPS), 1)
    try:
        run.statuses[STREAMS] = walk(options.seed + options.start, walks)
    except Exception as error:  # whatever the steps led to; Hypothesis has noted the fewest
        steps = "\n".join([*getattr(error, "__notes__", ()), repr(error)])
        run.violations.append(f"{STREAMS}: {steps}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--messages", type=int, default=20_000, help="how many, of all surfaces")
    parser.add_argument("--seconds", type=float, default=0.0, help="at most; 0 is no limit")
    parser.add_argument("--start", type=int, default=0, help="number of each surface's first one")
    parser.add_argument("--only", default="", help="surfaces, comma separated; each has its share")
    parser.add_argument(
        "--distil", action="store_true", help="keep the shortest message of each kind of answer"
    )
    parser.add_argument("--out", type=argparse.FileType("w"), help="write the counts as JSON")
    options = parser.parse_args()
    known = (*SURFACES, STREAMS)
    options.wanted = [name for name in options.only.split(",") if name] or list(known)
    if unknown := set(options.wanted) - set(known):
        parser.error(f"no surface {sorted(unknown)[0]!r}; there are {', '.join(known)}")
    return options


def main() -> None:
    """Exit code 1 if what came of a message may not; the message is in the corpus then."""
    options = _options()
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"seed {options.seed}, messages {options.start} and on")
    run = Run(options.seed, options.distil)
    with _quiet(), Progress(console=console, disable=not console.is_terminal) as bar:
        for name in options.wanted:
            began = time.monotonic()
            if name == STREAMS:
                _walked(options, run)
            else:
                surface = SURFACES[name]()
                asyncio.run(run.go_through(surface, _counted(options, surface, bar)))
            counts = run.statuses.get(name, Counter())
            told = ", ".join(f"{status} {count}" for status, count in counts.most_common())
            seconds = time.monotonic() - began
            console.print(f"{name}: {counts.total()} messages, {seconds:.0f} s: {told}")
    for violation in run.violations[:20]:
        console.print(violation, markup=False)
    total = sum(counts.total() for counts in run.statuses.values())
    console.print(f"{total} messages, {len(run.violations)} violations")
    console.print(f"go on with --seed {options.seed} --start {options.start + options.messages}")
    if options.out:
        report = {"seed": options.seed, "start": options.start, "statuses": run.statuses}
        options.out.write(json.dumps(report | {"violations": run.violations}, indent=1) + "\n")
    sys.exit(1 if run.violations else 0)


if __name__ == "__main__":
    main()

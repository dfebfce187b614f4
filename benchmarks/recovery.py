"""A drafter turns bad in mid-run, and good again: what sizes that are left open make of it.

    python -m benchmarks.recovery [--texts 1 8] [--target DIR]

Each phase asks for texts without drafts and with sizes left open, in turn; while the drafter is
bad, the first texts of its phase are told apart, since they have to find out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.measure.environment import RESULTS, describe
from benchmarks.simulated.shuffled import SHUFFLED
from benchmarks.sizes import AUTO, PLAIN, measure
from tandem.tools.local.pair import Pair
from tandem.tools.local.stack import StackSettings, running

_PHASES = ("good", "turned bad", "bad", "turned good", "good again")


@dataclass(frozen=True)
class Phase:
    """Texts of one phase.

    Attributes:
        name: of it.
        texts: at once.
        over_plain: tokens/s over those without drafts, median of the turns.
        drafted: share of rounds with a draft.
    """

    name: str
    texts: int
    over_plain: float
    drafted: float


def _phase(name: str, address: str, texts: int, turns: int) -> Phase:
    ratios: list[float] = []
    rounds = drafted = 0
    for turn in range(turns):
        auto = asyncio.run(measure(address, AUTO, texts, turn, 2 * texts, 1.0))
        plain = asyncio.run(measure(address, PLAIN, texts, turn, 2 * texts, 1.0))
        ratios.append(auto.tokens_per_s / plain.tokens_per_s)
        rounds += sum(auto.sizes.values())
        drafted += sum(count for size, count in auto.sizes.items() if size != "0/0")
    return Phase(name, texts, median(ratios), drafted / rounds)


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--texts", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--turns", type=int, default=5, help="of a phase; one where it changes")
    parser.add_argument(
        "--target", type=Path, help="a target of your own: drafts pay on a slow one"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "recovery.json")
    options = parser.parse_args()
    found: list[Phase] = []
    with tempfile.TemporaryDirectory() as scratch:
        flag = Path(scratch) / "shuffled"
        os.environ[SHUFFLED] = str(flag)  # for the drafter, which takes our environment
        services = {"orchestrator": {"LISTEN": "127.0.0.1:0"}, **Pair().settings()}
        if options.target:
            services["target"]["MODEL"] = str(options.target.resolve())
        modules = {"drafter": "benchmarks.simulated.shuffled"}
        with running(StackSettings(services, modules=modules)) as stack:
            address = stack.addresses["orchestrator"]
            for texts in options.texts:
                for name in _PHASES:
                    if name == "turned bad":
                        flag.touch()
                    elif name == "turned good":
                        flag.unlink()
                    turns = 1 if name.startswith("turned") else options.turns
                    found.append(_phase(name, address, texts, turns))
    table = Table("texts", "drafter", "auto over plain", "rounds with a draft")
    for phase in found:
        share = f"{phase.drafted:.0%}"
        table.add_row(str(phase.texts), phase.name, f"{phase.over_plain:.2f}", share)
    Console().print(table)
    rows = [asdict(phase) for phase in found]
    options.out.write_text(json.dumps({**describe(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()

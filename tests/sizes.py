"""Draft sizes in simulated services: tokens a second over those of the best fixed size.

    python -m tests.sizes [--texts 1 8 32] [--seeds 3]

For each world: Tandem's policy, with the profile that the services measured, with one that is wrong
by a factor of two, and without any; then the schedules of other engines. The first 60 rounds of
each text are not counted.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from orchestrator.sizes.goodput import PLAIN
from tests.support.rival_sizes import WithProfile, WithSteps
from tests.support.simulated_services import WORLDS, SimulatedServices

WAYS: dict[str, tuple[type[SimulatedServices], dict[str, float]]] = {
    "Tandem": (SimulatedServices, {}),
    "profile twice too slow": (SimulatedServices, {"profiled": 2.0}),
    "no profile": (SimulatedServices, {"profiled": 0.0}),
    "TurboSpec": (WithProfile, {}),
    "steps": (WithSteps, {}),
}


def measured(
    kind: type[SimulatedServices], world: Mapping[str, Any], texts: int, seeds: int
) -> tuple[float, float]:
    """Mean speed over the best fixed size's, and over plain decoding's."""
    best, plain = [], []
    for seed in range(seeds):
        made = kind(seed=seed, **world)
        made.run(60 * texts, texts, length=80)
        speed = made.run(400 * texts, texts, length=80)
        best.append(speed / made.best(texts))
        plain.append(speed / made.speed(PLAIN, texts))
    return mean(best), mean(plain)


def main() -> None:
    """Print a table for each number of texts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--texts", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    console = Console(width=130)
    for texts in options.texts:
        table = Table("world", *WAYS, title=f"{texts} texts: over the best fixed size (over plain)")
        for name, world in WORLDS.items():
            found = (
                measured(kind, {**world, **more}, texts, options.seeds)
                for kind, more in WAYS.values()
            )
            table.add_row(name, *(f"{best:.3f} ({plain:.3f})" for best, plain in found))
        console.print(table)


if __name__ == "__main__":
    main()

"""Does `tandem plan` foretell what a fleet does? One and two targets on simulated devices.

    python -m benchmarks.planned

A recording of a few clients on one target is all that the prediction has. Then fleets with other
numbers of replicas and of clients are run, and their tokens a second are held against what was
predicted. The services are real; of a device only the time is simulated, since two cores are the
limit otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.measure.environment import RESULTS, keep
from benchmarks.measure.texts import asked, token_ids
from benchmarks.overhead import save_pair
from benchmarks.simulated.fleet import Device, fleet
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.tools.load.generator import LoadGenerator
from tandem.tools.load.report import LoadReport
from tandem.tools.planning.measured.measurement import Measurement
from tandem.tools.planning.measured.recorded import measured_from
from tandem.tools.planning.simulation.rounds import Fleet, Load, Rounds
from tandem.tools.traces.read.recording import Recording

DEVICES = {"target": Device(40.0, 0.1), "drafter": Device(5.0, 0.05)}
_GAMMA = 4
# What is recorded: one of each, and so many clients after each other.
_RECORDED_CLIENTS = (1, 4, 8)
# Targets, drafters, clients of what is predicted.
_FLEETS = ((1, 1, 4), (1, 1, 12), (2, 1, 12), (2, 2, 12), (2, 2, 24))
_LENGTHS = (32, 48, 64, 96)
_TEXTS_EACH = 5


@dataclass(frozen=True)
class Trial:
    """A fleet, foretold and run."""

    targets: int
    drafters: int
    clients: int
    predicted_tokens_per_s: float
    measured_tokens_per_s: float
    predicted_tpot_ms: float
    measured_tpot_ms: float

    @property
    def error(self) -> float:
        """Of the predicted tokens a second, as a share of those measured."""
        return self.predicted_tokens_per_s / self.measured_tokens_per_s - 1


def _generations(count: int) -> list[pb.Generation]:
    return [
        asked(seed, _LENGTHS[seed % len(_LENGTHS)], prompt=token_ids(seed, 24), gamma=_GAMMA)
        for seed in range(count)
    ]


async def _load(address: str, clients: int) -> LoadReport:
    """A closed loop, after a warm-up. Rates are those of the report but for its last texts."""
    async with LoadGenerator(address) as generator:
        await generator.closed_loop(_generations(clients), clients)
        texts = await generator.closed_loop(_generations(_TEXTS_EACH * clients), clients)
    report = LoadReport.of(texts)
    if report.errors:
        raise RuntimeError(f"texts failed: {report.errors}")
    return report


def _recorded(models: dict[str, Path], folder: Path) -> Measurement:
    replicas = {"target": 1, "drafter": 1}
    with fleet(models, DEVICES, replicas, folder) as stack:
        for clients in _RECORDED_CLIENTS:
            asyncio.run(_load(stack.addresses["orchestrator"], clients))
    return measured_from(Recording([str(folder)]))


def _trial(
    models: dict[str, Path], measured: Measurement, targets: int, drafters: int, clients: int
) -> Trial:
    load = Load(_TEXTS_EACH * clients, clients=clients)
    predicted = Rounds(measured, Fleet(targets, drafters, _GAMMA), load)
    served = predicted.run()
    # Over all texts, the last ones too, as the run's own figure is.
    tokens = sum(text.shape.new_tokens for text in predicted.ended)
    wall = max(text.ended for text in predicted.ended)
    with fleet(models, DEVICES, {"target": targets, "drafter": drafters}) as stack:
        report = asyncio.run(_load(stack.addresses["orchestrator"], clients))
    assert report.tpot is not None
    return Trial(
        *(targets, drafters, clients, tokens / wall, report.tokens_per_s),
        *(float(served.tpot.mean()) * 1e3, report.tpot.mean),
    )


def _table(trials: list[Trial]) -> Table:
    heads = ("targets", "drafters", "clients", "tokens/s predicted", "measured", "error")
    table = Table(*heads, "TPOT predicted", "measured, ms")
    for t in trials:
        table.add_row(
            *(str(t.targets), str(t.drafters), str(t.clients)),
            *(f"{t.predicted_tokens_per_s:.0f}", f"{t.measured_tokens_per_s:.0f}"),
            *(f"{t.error:+.1%}", f"{t.predicted_tpot_ms:.1f}", f"{t.measured_tpot_ms:.1f}"),
        )
    return table


def main() -> None:
    """Record, foretell, run, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=RESULTS / "planned.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        models = save_pair(Path(scratch))
        traces = Path(scratch) / "traces"
        traces.mkdir()
        measured = _recorded(models, traces)
        trials = [_trial(models, measured, *replicas) for replicas in _FLEETS]
    Console(width=120).print(_table(trials))
    rows = [{**asdict(trial), "error": trial.error} for trial in trials]
    devices = {name: asdict(device) for name, device in DEVICES.items()}
    keep(options.out, devices_ms=devices, trials=rows)


if __name__ == "__main__":
    main()

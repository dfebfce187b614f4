"""What the metrics say of an engine: its steps as they end, its places and memory when asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from tandem.engine.job import Job
from tandem.telemetry import metrics
from tandem.telemetry.stages import StageTimes

if TYPE_CHECKING:
    from tandem.serving.servicer import Loaded
    from tandem.telemetry.instruments import Instruments

_NS = 1e-9
_STEPS = {metrics.DRAFTER: "draft", metrics.TARGET: "verify"}
_STAGES = tuple(
    (field.name, field.name.removesuffix("_ns"))
    for field in fields(StageTimes)
    if field.name.endswith("_ns")
)


class EngineMeter:
    """Books what an engine does.

    Args:
        instruments: to record into.
        loaded: the engine, and the model that scores.
    """

    def __init__(self, instruments: Instruments, loaded: Loaded) -> None:
        role = instruments.role
        self._stages = {
            step: [
                (name, instruments.histogram(metrics.STAGE_DURATION, role, step, stage))
                for name, stage in _STAGES
            ]
            for step in ("prefill", _STEPS[role])
        }
        self._step = _STEPS[role]
        self._batch = instruments.histogram(metrics.BATCH_SIZE, role)
        engine = loaded.engine
        engine.on_ended, engine.on_step = self.ended, self.stepped
        admission, watch = engine.admission, instruments.watch
        watch(metrics.SEQUENCES_OPEN, lambda: admission.open_sequences, role)
        watch(metrics.QUEUE_DEPTH, lambda: admission.waiting, role)
        if (model := loaded.model) is not None:
            # Asked anew each time: a model that goes over to a faster pass has another cache.
            watch(metrics.KV_POSITIONS, lambda: model.pool.free_positions, role, "free")
            watch(
                metrics.KV_POSITIONS,
                lambda: model.pool.positions - model.pool.free_positions,
                role,
                "used",
            )

    def stepped(self, sequences: int) -> None:
        """A pass was shared by so many sequences. Engine thread."""
        self._batch.observe(sequences)

    def ended(self, jobs: Sequence[Job[Any]]) -> None:
        """Jobs are over, and their answers on the way. Event loop.

        A stage that took no time was not there: a drafter decides nothing.
        """
        for job in jobs:
            if job.error is not None or job.done.cancelled():
                continue
            for name, histogram in self._stages["prefill" if job.opens else self._step]:
                if spent_ns := getattr(job.times, name):
                    histogram.observe(spent_ns * _NS)

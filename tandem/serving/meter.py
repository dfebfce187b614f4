"""What the metrics say of an engine: its steps as they end, its slots and memory when asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from tandem.engine.engine import Answered
from tandem.telemetry.metrics import catalog as metrics
from tandem.telemetry.stages import ENGINE_STAGES, name_of

if TYPE_CHECKING:
    from tandem.inference.model import Model
    from tandem.serving.loaded import LoadedService
    from tandem.telemetry.metrics.instruments import Instruments

_NS = 1e-9
_STEPS = {metrics.DRAFTER: "draft", metrics.TARGET: "verify"}


# Of a model.
_POSITIONS: Mapping[str, Callable[[Model], int]] = {
    "free": lambda model: model.free_positions - model.kept_positions,
    "kept": lambda model: model.kept_positions,
    "used": lambda model: model.positions - model.free_positions,
}


class EngineMeter:
    """Books what an engine does.

    Args:
        instruments: to record into.
        loaded: the engine, and the model that scores.
    """

    def __init__(self, instruments: Instruments, loaded: LoadedService) -> None:
        role = instruments.role
        self._step = _STEPS[role]
        self._stages = {
            step: [
                (
                    stage,
                    instruments.histogram(metrics.STAGE_DURATION, role, step, name_of(step, stage)),
                )
                for stage in ENGINE_STAGES
            ]
            for step in ("prefill", self._step, *(["draft"] if loaded.drafts_inside else []))
        }
        self._exemplar_of = instruments.exemplar_of
        self._queries = instruments.counter(metrics.PREFIX_CACHE_QUERIES, role)
        self._hits = instruments.counter(metrics.PREFIX_CACHE_HITS, role)
        self._given_back = instruments.counter(metrics.SEQUENCES_GIVEN_BACK, role)
        self._batch = instruments.histogram(metrics.BATCH_SIZE, role)
        engine = loaded.engine
        engine.on_answered, engine.on_step = self.answered, self.stepped
        engine.on_given_back = self.gave_back
        loaded.meter(instruments)
        admission, watch = engine.admission, instruments.watch
        watch(metrics.SEQUENCES_OPEN, lambda: admission.open_sequences, role)
        watch(metrics.QUEUE_DEPTH, lambda: admission.waiting, role)
        if models := loaded.models:
            # Asked each time: a model that goes over to a faster pass has another cache.
            for state, read in _POSITIONS.items():
                watch(metrics.KV_POSITIONS, partial(_sum, read, models), role, state)
            # Of all models together, as the positions are.
            pools = sum(1 for model in models if model.positions)
            watch(metrics.KV_PROMISED, lambda: admission.promised * pools, role)
            watch(metrics.KV_LONGEST, lambda: admission.longest, role)

    def stepped(self, sequences: int) -> None:
        """Count a step, by the number of sequences that share it. Engine thread."""
        self._batch.observe(sequences)

    def gave_back(self, sequences: int) -> None:
        """Count sequences whose memory was needed. Engine thread."""
        self._given_back.value += sequences

    def answered(self, results: Sequence[Answered]) -> None:
        """Results of jobs are on their way, each with its times. Event loop."""
        for job, lap, times in results:
            exemplar = self._exemplar_of(job.traced)
            step = lap or ("prefill" if job.opens else self._step)
            if job.opens:  # of several models the first one
                for cache in job.sequence.caches[:1]:
                    self._queries.value += cache.looked_up
                    self._hits.value += cache.found
            for stage, histogram in self._stages[step]:
                histogram.observe(times.of(stage) * _NS, exemplar)


def _sum(read: Callable[[Model], int], models: Sequence[Model]) -> int:
    return sum(map(read, models))

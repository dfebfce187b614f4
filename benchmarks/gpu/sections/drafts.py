"""Whole drafts of a drafter alone, beside the passes that they consist of."""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import Any, cast

import torch

from benchmarks.gpu import pair
from benchmarks.gpu.run import Run
from benchmarks.gpu.sections.numbers import SAMPLINGS
from benchmarks.gpu.shapes import TRUNCATION
from benchmarks.gpu.table import Figure
from benchmarks.gpu.timing import Deadline
from tandem.drafting.decoders.model import ModelDrafter
from tandem.drafting.drafter import DraftSequence, go_on
from tandem.engine.asks import Take
from tandem.engine.job import Job
from tandem.engine.stepper import Stepper
from tandem.speculation.request.sampling import Sampling
from tandem.speculation.tree import DraftSize

_GAMMA, _TEXTS, _ROOM = 4, (1, 16), 128
# Besides its passes a draft may take so many ms (issue 64).
_BESIDE_MS = 0.1


class _Nobody:
    """Waits for a job, in place of a future."""

    def cancelled(self) -> bool:
        """It goes on waiting."""
        return False


@torch.inference_mode()
def measure(run: Run, until: Deadline) -> None:
    """Drafts of four tokens at T 1, of one text and of sixteen."""
    for texts in _TEXTS:
        run.attempt(f"drafts of {texts} texts", partial(_of, run, texts))


def _of(run: Run, texts: int) -> None:
    shapes, of = run.shapes, run.model("drafter")
    method, stepper, rounds = ModelDrafter(of.decoder, TRUNCATION), Stepper(shapes.device), count(1)
    context = shapes.contexts[0]
    with of.texts(texts, 0, context + _ROOM) as caches:
        sequences = []
        for number, cache in enumerate(caches):
            sampling = Sampling(seed=number, **SAMPLINGS["T1"])
            prompt = pair.tokens(context, shapes, number + 1)
            sequence = DraftSequence(prompt, sampling, shapes.vocabulary)
            sequence.caches = [cache]
            sequences.append(sequence)
        _together(stepper, [Job(one, method.open(one)) for one in sequences])

        def draft() -> None:
            round_, size = next(rounds), DraftSize(_GAMMA)
            steps = [go_on(method, one, round_, [1 + round_], size) for one in sequences]
            jobs = [Job(*each) for each in zip(sequences, steps, strict=True)]
            _together(stepper, jobs)

        milliseconds, _ = run.stopwatch.times(draft)
    a_pass = run.value(f"drafter, {texts} at {context}", "x1")
    limit = None if a_pass is None else _GAMMA * a_pass
    bar = 1 + _BESIDE_MS / limit if limit and shapes.real else None
    name = f"of {_GAMMA}, {texts} texts"
    run.add(Figure("drafts beside their passes", name, milliseconds, "ms", limit, bar))


def _together(stepper: Stepper, jobs: list[Job[Any]]) -> None:
    """All steps of all jobs.

    Raises:
        EngineFailure: a distribution was not finite.
    """
    for job in jobs:
        job.done = cast(Any, _Nobody())
        job.arrived_ns = job.idle_ns = 0
        job.resume()
    while pending := [job for job in jobs if not job.over]:
        for job in pending:
            if isinstance(job.ask, Take):
                job.chunk = job.ask.left
        stepper.step(pending)
    for job in jobs:
        if job.error is not None:
            raise job.error

"""Jobs that are run to their end without an engine's thread, over real decoders on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tandem.engine.asks import Take
from tandem.engine.job import Job
from tandem.engine.stepper import Stepper


@torch.inference_mode()
def play(jobs: Sequence[Job[Any]]) -> None:
    """Each step has all jobs that are not over; a prompt is taken in at once."""
    stepper = Stepper(torch.device("cpu"))
    for job in jobs:
        job.done = type("Waiter", (), {"cancelled": lambda _: False})()
        job.resume()
    while pending := [job for job in jobs if not job.over]:
        for job in pending:
            if isinstance(job.ask, Take):
                job.chunk = job.ask.left
        stepper.step(pending)

"""Which jobs take part in the next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tandem.engine.asks import Take
from tandem.engine.job import Job


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Bounds on one step.

    Attributes:
        token_budget: new tokens of running sequences.
        prefill_chunk: prompt tokens beside them: what a running sequence waits for at most.
        chunk_alone: prompt tokens where no sequence is running, if more.
        gather: how long it may wait for others that should come, as a share of the last step.
    """

    token_budget: int = 512
    prefill_chunk: int = 512
    chunk_alone: int = 0
    gather: float = 0.0


def select(jobs: Sequence[Job[Any]], open_sequences: int, limits: BatchLimits) -> list[Job[Any]]:
    """The next step: running sequences first come, first served, and a chunk of prompts.

    The oldest of either kind always takes part, so none starves.

    Args:
        jobs: in the order of their arrival.
        open_sequences: that hold a slot now, those between two jobs included.
        limits: on the step.
    """
    selected: list[Job[Any]] = []
    opening: list[Job[Any]] = []
    budget = limits.token_budget
    for job in jobs:
        if job.opening:
            opening.append(job)
        elif (tokens := job.tokens) <= budget or not selected:
            budget -= tokens
            selected.append(job)
    if not opening:
        return selected
    chunk = limits.prefill_chunk
    if open_sequences <= len(opening):  # nobody's round has to wait
        chunk = max(chunk, limits.chunk_alone)
    return selected + _share_chunk(opening, chunk)


def _share_chunk(opening: Sequence[Job[Any]], chunk: int) -> list[Job[Any]]:
    """Half of the chunk for the oldest prompt, the rest for those who had least so far.

    So a short prompt does not wait for a long one, and a long one not for all that come.
    """
    oldest, *others = opening
    oldest.chunk = min(oldest.tokens, chunk - chunk // 2)
    left = chunk - oldest.chunk
    for job in sorted(others, key=_taken):
        job.chunk = min(left, job.tokens)
        left -= job.chunk
    oldest.chunk = min(oldest.tokens, oldest.chunk + left)
    return [job for job in opening if job.chunk]


def _taken(job: Job[Any]) -> int:
    assert isinstance(job.ask, Take)
    return job.ask.taken

"""Which jobs take part in the next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tandem.engine.asks import Draw, Take
from tandem.engine.job import Job


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Bounds on one step.

    Attributes:
        token_budget: new tokens of running sequences.
        prefill_chunk: prompt tokens beside them, in the mean of several steps.
        chunk_alone: prompt tokens where no sequence is running, if more; and as many may be saved
            by steps that had fewer than a chunk, for prompts that one step completes.
        gather: how long it may wait for others that should come, as a share of the last step.
    """

    token_budget: int = 512
    prefill_chunk: int = 512
    chunk_alone: int = 0
    gather: float = 0.0


def select(
    jobs: Sequence[Job[Any]], open_sequences: int, limits: BatchLimits, saved: int = 0
) -> list[Job[Any]]:
    """The next step: running sequences first come, first served, and a chunk of prompts.

    The oldest of either kind always takes part, so none starves. Where some draw and others wait
    for another model, that drafts are for, those who draw have steps of their own first: their
    passes are short, and then all share one of the large model.

    Args:
        jobs: in the order of their arrival.
        open_sequences: that hold a slot now, those between two jobs included.
        limits: on the step.
        saved: prompt tokens, see `saved_behind`.
    """
    selected: list[Job[Any]] = []
    opening: list[Job[Any]] = []
    budget = limits.token_budget
    drafting = {id(job.ask.scorer) for job in jobs if isinstance(job.ask, Draw)}
    for job in jobs:
        if drafting and id(job.ask.scorer) not in drafting:  # type: ignore[union-attr]
            continue
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
    return selected + _share_chunk(opening, chunk, max(chunk, saved))


def saved_behind(step: Sequence[Job[Any]], saved: int, limits: BatchLimits) -> int:
    """Prompt tokens that later steps may take beside their chunk: so a burst of short prompts is
    computed at once, and what running sequences wait for is a chunk a step in the mean.

    Args:
        step: that was selected.
        saved: before it.
        limits: on it.
    """
    taken = sum(job.chunk for job in step if job.opening)
    delays = any(not job.opening for job in step)
    earned = limits.prefill_chunk - taken * delays
    return min(max(saved + earned, 0), max(limits.prefill_chunk, limits.chunk_alone))


def _share_chunk(opening: Sequence[Job[Any]], chunk: int, most: int) -> list[Job[Any]]:
    """Half of the chunk for the oldest prompt, the rest for those who had least so far; beyond the
    chunk, whole prompts up to `most` tokens in all, the shortest first.

    So a short prompt does not wait for a long one, and a long one not for all that come.
    """
    oldest, *others = opening
    oldest.chunk = min(oldest.tokens, chunk - chunk // 2)
    left = chunk - oldest.chunk
    for job in sorted(others, key=_taken):
        job.chunk = min(left, job.tokens)
        left -= job.chunk
    oldest.chunk = min(oldest.tokens, oldest.chunk + left)
    left = most - sum(job.chunk for job in opening)
    for job in sorted(opening, key=_missing):
        missing = _missing(job)
        if missing <= left and not _taken(job):
            job.chunk += missing
            left -= missing
    return [job for job in opening if job.chunk]


def _taken(job: Job[Any]) -> int:
    assert isinstance(job.ask, Take)
    return job.ask.taken


def _missing(job: Job[Any]) -> int:
    return job.tokens - job.chunk

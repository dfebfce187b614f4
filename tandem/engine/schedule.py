"""Which jobs take part in the next step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.engine.asks import Draw, DrawTogether, Review, Take
from tandem.engine.job import Job
from tandem.profile import Profile

# Where no sequence is running, a chunk of prompts may take this many times as long as a pass of one
# row. In larger ones a burst's first prompts would only wait for its last.
_ROWS_ALONE = 10
# Tokens of such a chunk at most: a pass's intermediate results have no memory set aside.
_LARGEST_ALONE = 2048
# Full chunks of prompts that quiet steps save up for, enough for a burst of short prompts. The
# texts that run do not change that, since they share each pass.
_MOST_SAVED = 8
# Matrix products take rows in tiles of up to this many: row 129 costs a CPU a quarter of the 128
# before it.
_TILE = 128


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Bounds on one step.

    Attributes:
        token_budget: new tokens of running sequences.
        prefill_chunk: prompt tokens, in the mean of several steps; 0 follows the profile.
        prefill_share: what prompts add to the pass that they share with running sequences, as a
            share of its time; many short ones may add more.
        gather: how long it may wait for others that should come, as a share of the last step.
        profile: of the model that computes the prompts, with short texts.
        span: earlier positions for which a row's attention takes as long as the rest of its work.
    """

    token_budget: int = 512
    prefill_chunk: int = 0
    prefill_share: float = 0.5
    gather: float = 0.0
    profile: Profile = field(default_factory=Profile)
    span: float = math.inf

    @property
    def largest(self) -> int:
        """New tokens of the largest step; one round that exceeds the budget takes part all the
        same."""
        return self.token_budget + (self.prefill_chunk or max(_LARGEST_ALONE, self.token_budget))

    def chunk_beside(self, running: Sequence[Job[Any]], opening: Sequence[Job[Any]] = ()) -> int:
        """Prompt tokens in the step of running sequences, in the mean of several steps.

        Short prompts have at least their part of the time by number: sixteen that wait for one
        text that runs are not computed a few tokens at a time beside it. A prompt is short if a
        step where nothing runs could take it whole.

        Args:
            running: sequences in the step.
            opening: prompts that wait, those of other steps included.
        """
        if self.prefill_chunk:
            return self.prefill_chunk
        sequences = max(len(running), 1)
        rows = max(sum(job.tokens for job in running), 1)
        together = self.profile.at(sequences, rows / sequences)
        most = self.chunk_alone
        short = sum(_taken(job) + job.tokens <= most for job in opening) / sequences
        found = max(
            self.profile.rows_within(self.prefill_share * together, rows),
            min(self.profile.rows_within(short * together, rows), most),
        )
        return round(min(max(found / (1 + _depth(opening) / self.span), 1), self.token_budget))

    @property
    def chunk_alone(self) -> int:
        """Prompt tokens in a step where no sequence is running. With what is saved, any step may
        take up to this many in all, for prompts that it completes."""
        if self.prefill_chunk:
            return self.prefill_chunk
        found = self.profile.rows_within(_ROWS_ALONE * self.profile.at(1, 1))
        rows = round(min(max(found, 1), _LARGEST_ALONE))
        return rows // _TILE * _TILE or rows

    @property
    def most_saved(self) -> int:
        """Prompt tokens that are saved by steps that had fewer than a chunk."""
        return _MOST_SAVED * self.chunk_alone


# Passes of which a draft is made.
_DRAFTS = (Draw, DrawTogether, Review)


def select(
    jobs: Sequence[Job[Any]], open_sequences: int, limits: BatchLimits, saved: int = 0
) -> list[Job[Any]]:
    """The next step: running sequences first come, first served, and a chunk of prompts.

    Of those that may take part, the oldest of either kind does, so none starves. Where some draw
    and others wait for another model, that drafts are for, those that draw have steps of their own
    first: their passes are short, and then all share one of the large model. Jobs that no text
    waits for share steps with each other alone.

    Args:
        jobs: in the order of their arrival.
        open_sequences: that hold a slot now, those between two jobs included.
        limits: on the step.
        saved: prompt tokens, see `saved_behind`.
    """
    if any(job.idle for job in jobs):
        jobs = [job for job in jobs if not job.idle] or jobs
    selected: list[Job[Any]] = []
    opening: list[Job[Any]] = []
    budget = limits.token_budget
    drafting = {id(job.ask.scorer) for job in jobs if isinstance(job.ask, _DRAFTS)}
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
    alone = open_sequences <= len(opening)  # no round has to wait
    chunk = limits.chunk_alone if alone else limits.chunk_beside(selected, opening)
    return selected + _share_chunk(opening, chunk, max(chunk, min(saved, limits.chunk_alone)))


def saved_behind(
    step: Sequence[Job[Any]], jobs: Sequence[Job[Any]], saved: int, limits: BatchLimits
) -> int:
    """Prompt tokens that later steps may take beside their chunk: so a burst of short prompts is
    computed in few steps, and what running sequences wait for is a chunk a step in the mean.

    Args:
        step: that was selected.
        jobs: of which it was.
        saved: before it.
        limits: on it.
    """
    taken = sum(job.chunk for job in step if job.opening)
    running = [job for job in step if not job.opening]
    opening = [job for job in jobs if job.opening] if len(running) < len(step) else []
    earned = limits.chunk_beside(running, opening) - taken * bool(running)
    return min(max(saved + earned, 0), limits.most_saved)


def _share_chunk(opening: Sequence[Job[Any]], chunk: int, most: int) -> list[Job[Any]]:
    """Half of the chunk for the oldest prompt, the rest for those that need least; and beyond the
    chunk, whole prompts up to `most` tokens in all, the shortest first.

    So a short prompt does not wait for a long one, a long one not for all that come, and of equal
    ones the first runs while the others wait.
    """
    oldest = opening[0]
    kept = min(oldest.tokens, chunk - chunk // 2)  # for the oldest
    left = chunk - kept
    for job in sorted(opening, key=lambda job: job.tokens):
        own = kept * (job is oldest)
        job.chunk = min(own + left, job.tokens)
        left -= job.chunk - own
    left = most - sum(job.chunk for job in opening)
    for job in sorted(opening, key=_missing):
        missing = _missing(job)
        if missing <= left and not _taken(job):
            job.chunk += missing
            left -= missing
    return [job for job in opening if job.chunk]


def _depth(opening: Sequence[Job[Any]]) -> int:
    """Positions before the next chunks of prompts, of the deepest."""
    return max((job.ask.feed.cache.length for job in opening), default=0)  # type: ignore[union-attr]


def _taken(job: Job[Any]) -> int:
    assert isinstance(job.ask, Take)
    return job.ask.taken


def _missing(job: Job[Any]) -> int:
    return job.tokens - job.chunk

"""Sequences that hold less memory than they were promised: they grow, or the youngest goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tandem.engine.admission import AdmittedSequence
from tandem.engine.asks import Draw, Review
from tandem.engine.job import Job
from tandem.errors import OutOfRoom

Jobs = Sequence[Job[object]]


class GrowingSequences:
    """Has sequences hold what their next feeds need. Where there is no room, the one that opened
    last is given back, perhaps the one that needs it. Engine thread only.

    Args:
        reclaim: takes a sequence's memory.
    """

    def __init__(self, reclaim: Callable[[AdmittedSequence], None]) -> None:
        self._reclaim = reclaim
        # Those that may be given back, the oldest first; and those that were, until they are left.
        self._growing: dict[AdmittedSequence, None] = {}
        self._gone: set[AdmittedSequence] = set()

    def begin(self, sequence: AdmittedSequence) -> None:
        """A sequence has opened that holds less than it was promised."""
        self._growing[sequence] = None

    def end(self, sequence: AdmittedSequence) -> bool:
        """A sequence is left; whether its memory is still to be reclaimed."""
        self._growing.pop(sequence, None)
        if sequence not in self._gone:
            return True
        self._gone.discard(sequence)
        return False

    def refusal(self, sequence: AdmittedSequence) -> OutOfRoom | None:
        """Why a sequence does no more steps; None where it does."""
        if sequence not in self._gone:
            return None
        return OutOfRoom("older sequences needed the memory; open the text again where it is")

    def make_room(self, jobs: Jobs, others: Jobs = ()) -> Sequence[AdmittedSequence] | None:
        """Room for the next feeds of all jobs.

        Args:
            jobs: of the step that is to come.
            others: that wait for another step.

        Returns:
            None where there is. Else the sequences that were given back for it, whose jobs the
            caller ends; none where only drafts that nobody waits for had to end.
        """
        given_back: list[AdmittedSequence] = []
        ended = False
        for job in jobs:
            while job.sequence in self._growing and not _fits(job):
                if job.idle:
                    job.end(OutOfRoom("no room for a draft that is prepared"))
                    ended = True
                    break
                youngest = self._youngest(job, (*jobs, *others))
                del self._growing[youngest]
                self._gone.add(youngest)
                self._reclaim(youngest)
                given_back.append(youngest)
        return given_back if given_back or ended else None

    def _youngest(self, job: Job[object], jobs: Jobs) -> AdmittedSequence:
        """Who goes for a job. Not who is drafting: how long that takes hangs on what it has drawn,
        and to drop a draft for it would bias its text."""
        drafting = {one.sequence for one in jobs if one.drafting and not one.idle}
        free = (one for one in reversed(self._growing) if one not in drafting)
        return next(free, job.sequence)


def _fits(job: Job[object]) -> bool:
    """Whether a job's sequence holds what its next feed needs, by now; with the first draw of a
    draft, what all of the draft needs in each of its caches, and its verdict."""
    ask = job.ask
    assert ask is not None
    cache = ask.feed.cache  # type: ignore[union-attr]  # only asks for passes wait between steps
    wanted = cache.used + (job.chunk if job.opening else job.tokens)
    if job.idle:
        return bool(min(wanted, cache.promised) <= cache.capacity)
    if not isinstance(ask, (Draw, Review)):
        return _holds(cache, wanted)
    if isinstance(ask, Draw):
        wanted += max(ask.follow, ask.nodes - ask.node)
    return all(_holds(one, wanted) for one in job.sequence.caches if one.pool is not None)


def _holds(cache: Any, wanted: int) -> bool:
    wanted = min(wanted, cache.promised)
    return wanted <= cache.capacity or bool(cache.pool.grow(cache, wanted))

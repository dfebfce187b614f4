"""Sequences that hold less memory than they were promised: they grow, or the youngest goes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.engine.admission import HEADROOM, AdmittedSequence
from tandem.engine.asks import Draw, DrawTogether, Review
from tandem.engine.job import Job
from tandem.errors import OutOfRoom
from tandem.speculation.tree import LONGEST_DRAFT

Jobs = Sequence[Job[object]]


@dataclass(slots=True)
class RoomMade:
    """What became of those that need room.

    Attributes:
        given_back: sequences, whose jobs the caller ends.
        waiting: jobs that skip the step, until younger sequences have ended their drafts.
        ended: whether drafts that no text waits for had to end.
    """

    given_back: list[AdmittedSequence] = field(default_factory=list)
    waiting: list[Job[object]] = field(default_factory=list)
    ended: bool = False


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
        return OutOfRoom("older sequences needed the memory; open the text again with its tokens")

    def make_room(self, jobs: Jobs, others: Jobs = ()) -> RoomMade:
        """Room for the next feeds of all jobs.

        Args:
            jobs: of the step that is to come.
            others: that wait for another step.
        """
        made = RoomMade()
        drafting = {one.sequence for one in (*jobs, *others) if one.drafting and not one.idle}
        for job in jobs:
            while job.sequence in self._growing:
                lacking = self._lacking(job)
                if lacking is None:
                    break
                if job.idle:
                    job.end(OutOfRoom("no room for a draft that is prepared"))
                    made.ended = True
                    break
                youngest = self._youngest(job, lacking, drafting)
                if youngest is None and len(made.waiting) + 1 < len(jobs):
                    made.waiting.append(job)
                    break
                self._give_back(youngest or job.sequence, made)
        return made

    def _give_back(self, sequence: AdmittedSequence, made: RoomMade) -> None:
        del self._growing[sequence]
        self._gone.add(sequence)
        made.given_back.append(sequence)
        self._reclaim(sequence)

    def _youngest(
        self, job: Job[object], pool: object, drafting: Collection[AdmittedSequence]
    ) -> AdmittedSequence | None:
        """The sequence to give back for a job, of those with memory of a pool; None where all
        younger ones are drafting. A draft's length may depend on its draws, so to drop it would
        bias the text; and drafts end soon."""
        waits = False
        for one in reversed(self._growing):
            if one is job.sequence:
                return None if waits else one
            if any(cache.pool is pool for cache in one.caches):
                if one not in drafting:
                    return one
                waits = True
        return None

    def _lacking(self, job: Job[object]) -> object | None:
        """The pool that has no room for what a job's next feed needs; None where all have. With the
        first draw of a draft, each of its sequence's caches gets room for the longest draft and its
        verdict: whether there is room must not depend on what was drawn."""
        ask = job.ask
        assert ask is not None
        cache = ask.feed.cache  # type: ignore[union-attr]  # only asks for passes wait between steps
        tokens = job.chunk if job.opening else job.tokens
        if job.idle:  # no text waits for it: while plenty is left
            more = min(cache.used + tokens, cache.promised) - cache.capacity
            left = cache.pool.free_positions - HEADROOM * len(self._growing)
            return None if more <= 0 or (more <= left and _holds(cache, tokens)) else cache.pool
        if job.drafting or not isinstance(ask, (Draw, DrawTogether, Review)):
            return None if _holds(cache, tokens) else cache.pool
        caches = [one for one in job.sequence.caches if one.pool is not None]
        text = max((one.used for one in caches), default=0) + tokens
        for one in caches:
            if not _holds(one, text + LONGEST_DRAFT + job.sequence.nodes - one.used):
                pool: object = one.pool
                return pool
        return None


def _holds(cache: Any, more: int) -> bool:
    """Whether a cache has this many positions beyond those in use, or can grow to them now."""
    wanted = min(cache.used + more, cache.promised)
    return wanted <= cache.capacity or bool(cache.pool.grow(cache, wanted))

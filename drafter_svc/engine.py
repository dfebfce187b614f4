"""The drafter's engine: drafts of many sequences, one token a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from drafter_svc.drafters.drafter import Drafter, DraftRequest, DraftSequence
from tandem.inference.decoder import Decoder
from tandem.inference.engine import Engine, Job
from tandem.speculation.draft import Draft
from tandem.speculation.randomness import Draws, Purpose, integers
from tandem.speculation.sampling import Sampling
from tandem.telemetry.stages import StageTimes


@dataclass(eq=False)
class _Open(Job):
    """A prompt to take in."""

    sequence: DraftSequence


@dataclass(eq=False)
class _Draft(Job):
    """A draft in the making; `new_token_ids` is emptied by its first step."""

    request: DraftRequest
    new_token_ids: Sequence[int]


class DrafterEngine(Engine[_Open | _Draft, DraftSequence]):
    """Awaitables of a sequence over the engine thread: open, draft, and release."""

    def __init__(self, decoder: Decoder, drafter: Drafter, max_sequences: int) -> None:
        super().__init__("drafter-engine", decoder, max_sequences)
        self.drafter = drafter

    def admit(
        self, token_ids: list[int], sampling: Sampling, vocab_size: int, capacity: int
    ) -> DraftSequence:
        """Take a place for a sequence; `release` gives it back.

        Raises:
            Exhausted: every place is taken.
        """
        sequence = DraftSequence(token_ids, sampling, vocab_size, capacity)
        self._admit(sequence)
        return sequence

    async def open(self, sequence: DraftSequence) -> StageTimes:
        """Take in the prompt."""
        job = _Open(sequence)
        await self._submit(job)
        return job.times

    async def draft(
        self, sequence: DraftSequence, round_: int, new_token_ids: Sequence[int], gamma: int
    ) -> tuple[Draft, StageTimes]:
        """Move a sequence on by emitted tokens, then draft `gamma` more.

        The draft depends on the sequence, its seed and `round_` alone.
        """
        bits = integers(Draws(sequence.sampling.seed, Purpose.DRAFT, round_, gamma))
        job = _Draft(DraftRequest(sequence, gamma, bits), new_token_ids)
        await self._submit(job)
        return job.request.draft(), job.times

    def _step(self, jobs: list[_Open | _Draft]) -> None:
        """One prompt at most, and one token for every draft in the making."""
        opening = next((job for job in jobs if isinstance(job, _Open)), None)
        if opening is not None:
            self._start(opening)
            before = self.decoder.forward_ns
            self.drafter.open(opening.sequence)
            opening.times.forward_ns += self.decoder.forward_ns - before
            opening.finish()
        drafting = [job for job in jobs if isinstance(job, _Draft)]
        if not drafting:
            return
        for job in drafting:
            self._start(job)
        before = self.decoder.forward_ns
        self.drafter.propose([job.request for job in drafting])
        spent = self.decoder.forward_ns - before
        for job in drafting:
            job.times.forward_ns += spent
            job.times.batch_size = len(drafting)
            if job.request.complete:
                job.finish()

    def _start(self, job: _Open | _Draft) -> None:
        job.start()
        if isinstance(job, _Draft) and job.new_token_ids:
            self.drafter.extend(job.request.sequence, job.new_token_ids)
            job.new_token_ids = ()

    def _free(self, sequence: DraftSequence) -> None:
        self.drafter.close(sequence)

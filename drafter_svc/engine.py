"""The drafter's engine: drafts of many sequences, one token a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from drafter_svc.drafters.drafter import Drafter, DraftRequest, DraftSequence, PromptChunk
from tandem.errors import EngineFailure
from tandem.inference.admission import AdmissionLimits
from tandem.inference.decoder import Decoder
from tandem.inference.engine import BatchLimits, Engine
from tandem.inference.job import Job
from tandem.speculation.draft import Draft
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
    draft: Draft = field(init=False)

    def __post_init__(self) -> None:
        self.sequence = self.request.sequence

    @property
    def tokens(self) -> int:
        return max(len(self.new_token_ids), 1)

    def prepare(self) -> None:
        """The random numbers, while the first token is being computed."""
        _ = self.request.bits


class DrafterEngine(Engine[_Open | _Draft, DraftSequence]):
    """Awaitables of a sequence over the engine thread: open, draft, and release."""

    def __init__(
        self, decoder: Decoder, drafter: Drafter, admission: AdmissionLimits, batch: BatchLimits
    ) -> None:
        super().__init__("drafter-engine", decoder, admission, batch)
        self.drafter = drafter

    async def open(self, sequence: DraftSequence, capacity: int) -> StageTimes:
        """Give a sequence room for `capacity` tokens and take in its prompt."""
        job = _Open(sequence)
        job.prompt = list(sequence.token_ids)
        await self._open(job, sequence, capacity)
        return job.times

    async def draft(
        self, sequence: DraftSequence, round_: int, new_token_ids: Sequence[int], gamma: int
    ) -> tuple[Draft, StageTimes]:
        """Move a sequence on by emitted tokens, then draft `gamma` more.

        The draft depends on the sequence, its seed and `round_` alone.
        """
        job = _Draft(DraftRequest(sequence, round_, gamma), new_token_ids)
        await self._submit(job)
        return job.draft, job.times

    def _step(self, jobs: Sequence[_Open | _Draft]) -> None:
        """One token for every draft in the making, and a chunk of the prompts."""
        chunks, requests = [], []
        for job in jobs:
            if isinstance(job, _Open):
                if job.sequence.state is None:
                    self.drafter.open(job.sequence)
                chunks.append(PromptChunk(job.sequence, job.take_chunk()))
            else:
                if job.new_token_ids:
                    self.drafter.extend(job.request.sequence, job.new_token_ids)
                    job.new_token_ids = ()
                requests.append(job.request)
        self.drafter.propose(requests, chunks)
        for job in jobs:
            if isinstance(job, _Open):
                if not job.prompt:
                    job.end()
            elif job.request.complete:
                try:
                    job.draft = job.request.draft()
                    job.end()
                except EngineFailure as failure:
                    job.end(failure)

"""The target's engine: one forward pass a round, then the verifier, on the device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.errors import EngineFailure
from tandem.inference.cache import SequenceCache
from tandem.inference.decoder import Decoder
from tandem.inference.engine import Engine, Job
from tandem.speculation.distribution import process
from tandem.speculation.draft import Draft
from tandem.speculation.proposal import Proposal
from tandem.speculation.randomness import Draws, Purpose, uniforms
from tandem.speculation.sampling import Sampling
from target_svc.verifiers import Verifier


@dataclass(eq=False)
class TargetSequence:
    """One sequence as the target sees it.

    Attributes:
        token_ids: of the prompt, until they are computed.
        sampling: the request's parameters; its seed keys the draws.
        rule: its verifier.
        carry: the verifier's state between rounds.
        cache: holds all tokens but the last.
        last_token: emitted last, not computed yet.
        length: tokens held, the last one included.
    """

    token_ids: list[int]
    sampling: Sampling
    rule: Verifier[Any]
    carry: Any
    cache: SequenceCache
    last_token: int = -1
    length: int = 0


@dataclass(eq=False)
class VerifyJob(Job):
    """A draft to verify; the prefill is one without a draft.

    Attributes:
        sequence: the draft's.
        round: keys the random numbers.
        draft: may be empty.
        num_accepted: result, drafted tokens kept.
        next_token: result, the correction or bonus.
        overlaps: result, Σ min(p, q) of each drafted position.
    """

    sequence: TargetSequence
    round: int
    draft: Draft
    num_accepted: int = field(default=0, init=False)
    next_token: int = field(default=0, init=False)
    overlaps: list[float] = field(default_factory=list, init=False)


class TargetEngine(Engine[VerifyJob, TargetSequence]):
    """Awaitables of a sequence over the engine thread: open, verify, and release."""

    def __init__(self, decoder: Decoder, max_sequences: int) -> None:
        super().__init__("target-engine", decoder, max_sequences)

    def admit(
        self,
        token_ids: list[int],
        sampling: Sampling,
        rule: Verifier[Any],
        carry: Any,
        capacity: int,
    ) -> TargetSequence:
        """Take a place for a sequence; `release` gives it back.

        Raises:
            Exhausted: every place is taken.
        """
        sequence = TargetSequence(token_ids, sampling, rule, carry, SequenceCache(capacity))
        self._admit(sequence)
        return sequence

    async def open(self, sequence: TargetSequence, round_: int) -> VerifyJob:
        """Compute the prompt and draw the first token, a round of gamma 0.

        With a carry no token is drawn: the rule needs a draft at the next position.
        """
        job = VerifyJob(sequence, round_, Draft.from_rows([], []))
        await self._submit(job)
        return job

    async def verify(self, sequence: TargetSequence, round_: int, draft: Draft) -> VerifyJob:
        """Score a draft, decide, and move the sequence on by accepted + 1 tokens."""
        job = VerifyJob(sequence, round_, draft)
        await self._submit(job)
        return job

    def _step(self, jobs: list[VerifyJob]) -> None:
        """One prompt at most, and every draft that waits."""
        prefills = [job for job in jobs if job.sequence.length == 0][:1]
        batch = [job for job in jobs if job.sequence.length > 0]
        for job in prefills:
            if job.sequence.carry is None:
                batch.append(job)
            else:
                self._resume(job)
        batch.sort(key=lambda job: job.sequence.rule.name)
        for _, group in groupby(batch, key=lambda job: job.sequence.rule.name):
            self._verify(list(group))

    def _verify(self, jobs: list[VerifyJob]) -> None:
        """Score and decide the rounds of sequences that share a rule."""
        gamma = max(len(job.draft) for job in jobs)
        target_probs = torch.zeros(
            len(jobs), gamma + 1, self.decoder.vocab_size, device=self.decoder.device
        )
        started = time.perf_counter_ns()
        modelled = self.decoder.forward_ns
        for b, job in enumerate(jobs):
            job.start()
            before = self.decoder.forward_ns
            target_probs[b, : len(job.draft) + 1] = self._score(job)
            job.times.forward_ns = self.decoder.forward_ns - before
        proposal = Proposal.from_drafts([job.draft for job in jobs], self.decoder.device)
        proposal = proposal.with_rows(self.decoder.vocab_size, target_probs.dtype)
        verdict = jobs[0].sequence.rule.verify(
            proposal,
            target_probs,
            torch.from_numpy(_uniforms(jobs, gamma)).to(self.decoder.device),
            [job.sequence.carry for job in jobs],
        )
        results = torch.cat(
            (
                verdict.num_accepted[:, None].double(),
                verdict.next_token[:, None].double(),
                target_probs.sum((1, 2))[:, None].double(),
                _overlaps(proposal, target_probs).double(),
            ),
            dim=1,
        ).tolist()  # the round's one synchronisation with the host
        spent = time.perf_counter_ns() - started - (self.decoder.forward_ns - modelled)
        for job, carry, result in zip(jobs, verdict.carry, results, strict=True):
            job.times.accept_ns = spent
            job.times.batch_size = 1
            self._commit(job, carry, result)

    def _resume(self, job: VerifyJob) -> None:
        """Compute a resumed sequence up to its last token, and draw nothing."""
        sequence = job.sequence
        job.start()
        before = self.decoder.forward_ns
        *computed, sequence.last_token = sequence.token_ids
        if computed:
            self.decoder.forward(sequence.cache, computed, 1)
        sequence.length = len(sequence.token_ids)
        sequence.token_ids = []
        job.times.forward_ns = self.decoder.forward_ns - before
        job.finish()

    def _score(self, job: VerifyJob) -> Tensor:
        """[g+1, V] processed distributions behind the last token and each drafted one."""
        sequence = job.sequence
        new = sequence.token_ids if sequence.length == 0 else [sequence.last_token]
        fed = new + job.draft.token_ids.tolist()
        logits = self.decoder.forward(sequence.cache, fed, len(job.draft) + 1)
        return process(logits, sequence.sampling)

    def _commit(self, job: VerifyJob, carry: Any, result: Sequence[float]) -> None:
        """Write a verdict into its sequence; the rejected part of the cache is rewound."""
        sequence = job.sequence
        num_accepted, next_token, total, *overlaps = result
        if not np.isfinite(total):
            job.finish(EngineFailure("the target computed a distribution that is not finite"))
            return
        job.num_accepted, job.next_token = int(num_accepted), int(next_token)
        job.overlaps = overlaps[: len(job.draft)]
        before = sequence.length or len(sequence.token_ids)
        sequence.cache.rollback(before + job.num_accepted)
        sequence.length = before + job.num_accepted + 1
        sequence.last_token = job.next_token
        sequence.token_ids = []
        sequence.carry = carry
        job.finish()

    def _free(self, sequence: TargetSequence) -> None:
        del sequence.cache


def _uniforms(jobs: Sequence[VerifyJob], gamma: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """[B, gamma+1]: each row's acceptance, then the draw, keyed by the job's seed and round."""
    drawn = uniforms(
        *(
            Draws(job.sequence.sampling.seed, purpose, job.round, count)
            for job in jobs
            for purpose, count in ((Purpose.ACCEPT, len(job.draft)), (Purpose.RESIDUAL, 1))
        )
    )
    values = np.ones((len(jobs), gamma + 1))
    start = 0
    for b, job in enumerate(jobs):
        end = start + len(job.draft)
        values[b, : len(job.draft)] = drawn[start:end]
        values[b, gamma] = drawn[end]
        start = end + 1
    return values


def _overlaps(proposal: Proposal, target_probs: Tensor) -> Tensor:
    """[B, G]: Σ_x min(p(x), q(x)) of each drafted position."""
    q = proposal.dense(target_probs.shape[-1], target_probs.dtype)
    return torch.minimum(target_probs[:, :-1], q).sum(-1)

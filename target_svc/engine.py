"""The target's engine: one forward pass a round, then the verifier, on the device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.errors import EngineFailure
from tandem.inference.admission import AdmissionLimits
from tandem.inference.batch import Feed
from tandem.inference.cache import SequenceCache
from tandem.inference.decoder import Decoder
from tandem.inference.engine import BatchLimits, Engine
from tandem.inference.job import Job
from tandem.speculation.distribution import process
from tandem.speculation.draft import Draft
from tandem.speculation.proposal import Proposal
from tandem.speculation.randomness import Draws, Lookahead, Purpose, uniforms
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
        cache: its extent of the KV pool; holds all tokens but the last.
        last_token: emitted last, not computed yet.
        length: tokens held, the last one included; 0 until the prompt is computed.
        uniforms: of a round, see `VerifyJob`.
    """

    token_ids: list[int]
    sampling: Sampling
    rule: Verifier[Any]
    carry: Any
    cache: SequenceCache = field(init=False)
    last_token: int = -1
    length: int = 0
    uniforms: Lookahead[npt.NDArray[np.float64]] = field(init=False)

    def __post_init__(self) -> None:
        self.uniforms = Lookahead(partial(_uniforms_of, self.sampling.seed))


@dataclass(eq=False)
class VerifyJob(Job):
    """A draft to verify; the prefill is one without a draft.

    Attributes:
        sequence: the draft's.
        round: keys the random numbers.
        draft: may be empty.
        opens: whether it computes the prompt.
        num_accepted: result, drafted tokens kept.
        next_token: result, the correction or bonus.
        overlaps: result, Σ min(p, q) of each drafted position.
        levels: result, the carry as it travels; None where the rule has none.
    """

    sequence: TargetSequence
    round: int
    draft: Draft
    opens: bool = False
    num_accepted: int = field(default=0, init=False)
    next_token: int = field(default=0, init=False)
    overlaps: list[float] = field(default_factory=list, init=False)
    levels: list[tuple[float, int]] | None = field(default=None, init=False)

    @property
    def tokens(self) -> int:
        return 0 if self.opens else 1 + len(self.draft)

    @cached_property
    def uniforms(self) -> npt.NDArray[np.float64]:
        """[gamma+1]: each drafted row's acceptance, then the draw."""
        return self.sequence.uniforms.take(self.round, len(self.draft))

    @cached_property
    def proposal(self) -> Proposal:
        """The draft as the only one of a batch, on the host."""
        return Proposal.from_drafts([self.draft])

    def prepare(self) -> None:
        """What the verdict needs, while the model scores the draft."""
        _ = self.uniforms, self.proposal


class TargetEngine(Engine[VerifyJob, TargetSequence]):
    """Awaitables of a sequence over the engine thread: open, verify, and release."""

    def __init__(self, decoder: Decoder, admission: AdmissionLimits, batch: BatchLimits) -> None:
        super().__init__("target-engine", decoder, admission, batch)

    async def open(self, sequence: TargetSequence, round_: int, capacity: int) -> VerifyJob:
        """Give a sequence room for `capacity` tokens, compute its prompt and draw the first
        token, a round of gamma 0.

        With a carry no token is drawn: the rule needs a draft at the next position.
        """
        job = VerifyJob(sequence, round_, Draft.none(), opens=True)
        job.prompt = list(sequence.token_ids)
        if sequence.carry is not None:
            sequence.last_token = job.prompt.pop()
            sequence.length = len(sequence.token_ids)
        await self._open(job, sequence, capacity)
        return job

    async def verify(self, sequence: TargetSequence, round_: int, draft: Draft) -> VerifyJob:
        """Score a draft, decide, and move the sequence on by accepted + 1 tokens."""
        job = VerifyJob(sequence, round_, draft)
        await self._submit(job)
        return job

    def _step(self, jobs: Sequence[VerifyJob]) -> None:
        """Every draft that waits and a chunk of the prompts, in one pass; then the verdicts."""
        feeds, deciding = [], []
        for job in jobs:
            feed = self._feed(job)
            feeds.append(feed)
            if feed.rows:
                deciding.append(job)
            elif not job.prompt:
                job.end()
        logits = self.decoder.forward(feeds)
        if deciding:
            started = time.perf_counter_ns()
            self._decide(deciding, logits)
            spent = time.perf_counter_ns() - started
            for job in deciding:
                job.times.accept_ns = spent

    def _feed(self, job: VerifyJob) -> Feed:
        """What a job has computed in this step, and how many rows of it decide something."""
        sequence = job.sequence
        if job.prompt:
            chunk = job.take_chunk()
            draws = not job.prompt and sequence.length == 0
            return Feed(sequence.cache, chunk, 1 if draws else 0)
        fed = [sequence.last_token, *job.draft.token_ids.tolist()]
        return Feed(sequence.cache, fed, len(fed))

    def _decide(self, jobs: Sequence[VerifyJob], logits: Tensor) -> None:
        """Verify each rule's rounds together, and write all verdicts down.

        Args:
            jobs: with a row for their last token and one for each drafted token.
            logits: [sum of rows, V].
        """
        samplings = [job.sequence.sampling for job in jobs for _ in range(1 + len(job.draft))]
        probs = process(logits, samplings)
        starts = np.cumsum([0] + [1 + len(job.draft) for job in jobs])
        # Drafts of about one length share a batch, or a long one would pad all others to its own.
        groups: dict[tuple[str, int], list[int]] = {}
        for b, job in enumerate(jobs):
            key = (job.sequence.rule.name, len(job.draft).bit_length())
            groups.setdefault(key, []).append(b)
        decided = [
            self._verify([jobs[b] for b in group], [int(starts[b]) for b in group], probs)
            for group in groups.values()
        ]
        # The round's one synchronisation with the host.
        numbers = torch.cat([verdicts.flatten() for _, verdicts in decided]).cpu().numpy()
        for group, (carry, verdicts) in zip(groups.values(), decided, strict=True):
            rows, numbers = np.split(numbers, [verdicts.numel()])
            for b, level, row in zip(group, carry, rows.reshape(verdicts.shape), strict=True):
                _commit(jobs[b], level, row)

    def _verify(
        self, jobs: Sequence[VerifyJob], starts: Sequence[int], probs: Tensor
    ) -> tuple[list[Any], Tensor]:
        """Decide the rounds of sequences that share a rule.

        Args:
            jobs: the rounds.
            starts: each one's first row of `probs`.
            probs: [R, V] processed distributions.

        Returns:
            The carries, and [B, 3 + G] float64: tokens kept, next token, a number that is
            finite if all rows are, and the overlap of each drafted position.
        """
        gamma = max(len(job.draft) for job in jobs)
        target_probs = _stack(probs, starts, [len(job.draft) for job in jobs], gamma)
        proposal = _proposal(jobs, self.decoder.device)
        verdict = jobs[0].sequence.rule.verify(
            proposal,
            target_probs,
            _uniforms(jobs, gamma).to(self.decoder.device, non_blocking=True),
            [job.sequence.carry for job in jobs],
        )
        columns = (
            verdict.num_accepted[:, None],
            verdict.next_token[:, None],
            # A logit that is no number makes its whole row so.
            target_probs[:, :, 0].sum(1, keepdim=True),
            proposal.overlaps(target_probs),
        )
        return verdict.carry, torch.cat([column.double() for column in columns], dim=1)


def _stack(probs: Tensor, starts: Sequence[int], lengths: Sequence[int], gamma: int) -> Tensor:
    """[B, G+1, V] from rows [R, V]; zeros behind a shorter draft's last row."""
    if len(starts) == 1:
        return probs[None, starts[0] : starts[0] + gamma + 1]
    rows = len(probs)
    index = [
        [start + i if i <= length else rows for i in range(gamma + 1)]
        for start, length in zip(starts, lengths, strict=True)
    ]
    padded = torch.nn.functional.pad(probs, (0, 0, 0, 1))
    return padded[torch.tensor(index).to(probs.device, non_blocking=True)]


def _commit(job: VerifyJob, carry: Any, verdict: npt.NDArray[np.float64]) -> None:
    """Write a verdict into its sequence; the rejected part of the cache is rewound."""
    sequence = job.sequence
    if not np.isfinite(verdict[2]):
        job.end(EngineFailure("the target computed a distribution that is not finite"))
        return
    job.num_accepted, job.next_token = int(verdict[0]), int(verdict[1])
    job.overlaps = verdict[3 : 3 + len(job.draft)].tolist()
    before = sequence.length or len(sequence.token_ids)
    sequence.cache.rollback(before + job.num_accepted)
    sequence.length = before + job.num_accepted + 1
    sequence.last_token = job.next_token
    sequence.carry = carry
    job.levels = None if carry is None else carry.levels()
    sequence.token_ids = []
    job.end()


def _proposal(jobs: Sequence[VerifyJob], device: torch.device) -> Proposal:
    """The drafts of a batch; that of a job alone may be ready."""
    if len(jobs) == 1:
        return jobs[0].proposal.to(device)
    return Proposal.from_drafts([job.draft for job in jobs], device)


def _uniforms_of(seed: int, round_: int, gamma: int) -> npt.NDArray[np.float64]:
    acceptances = Draws(seed, Purpose.ACCEPT, round_, gamma)
    return uniforms(acceptances, Draws(seed, Purpose.RESIDUAL, round_, 1))


def _uniforms(jobs: Sequence[VerifyJob], gamma: int) -> Tensor:
    """[B, gamma+1]: column i decides row i, the last one draws what follows."""
    values = np.ones((len(jobs), gamma + 1))
    for b, job in enumerate(jobs):
        *accepting, drawing = job.uniforms
        values[b, : len(accepting)], values[b, gamma] = accepting, drawing
    return torch.from_numpy(values)

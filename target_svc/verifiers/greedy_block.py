"""Greedy block verification (Sun et al., arXiv 2403.10444, Algorithms 4 to 6).

One round accepts as much as any coupling can, and pays for it: the target's law has to be
modified for the rest of the block. Modifications nest, live across rounds, and need q at
each position they touch, so every draft of a request has the same length (but for what
max_new_tokens leaves) and goes on past an end of text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tandem.speculation.proposal import Proposal, Verdict
from target_svc.verifiers.verifier import (
    MAX_RATIO,
    Verifier,
    drafted,
    last_success,
    of_drafted_tokens,
    padded,
    positive_or,
    ratios,
    row_at,
)

_MAX_LOG_RATIO = math.log(MAX_RATIO)


@dataclass(frozen=True, slots=True)
class GreedyBlockCarry:
    """The modifications that still apply to a sequence, oldest first.

    Attributes:
        log_ratios: [J], ln of the joint p/q since the start of the block that made the
            level; p is the target as the older levels left it.
        counts: [J] int64, coming positions still modified; 0 marks an unused level.
    """

    log_ratios: Tensor
    counts: Tensor

    @classmethod
    def from_levels(
        cls, levels: Sequence[tuple[float, int]], device: torch.device | str = "cpu"
    ) -> GreedyBlockCarry:
        """From (log ratio, count) pairs, as they travel."""
        return cls(
            torch.tensor([ratio for ratio, _ in levels], dtype=torch.float64, device=device),
            torch.tensor([count for _, count in levels], dtype=torch.int64, device=device),
        )

    def levels(self) -> list[tuple[float, int]]:
        """As (log ratio, count) pairs, unused levels left out. Synchronises with the host."""
        pairs = zip(self.log_ratios.tolist(), self.counts.tolist(), strict=True)
        return [(ratio, count) for ratio, count in pairs if count > 0]


@dataclass(frozen=True, slots=True)
class _Block:
    """A round as the rule sees it.

    Attributes:
        q: [B, G, V].
        rows: [B, G+1, V], the target's rows as modified by all levels.
        joint: [B, G+1], the uncapped joint ratio of each prefix of the draft.
        log_ratios: [B, G+1, J], each level's log ratio after each prefix.
        counts: [B, J].
    """

    q: Tensor
    rows: Tensor
    joint: Tensor
    log_ratios: Tensor
    counts: Tensor


class GreedyBlockVerifier(Verifier):
    """Keeps each prefix with probability min(p, q) of the whole prefix, then mends the law."""

    name = "greedy_block"
    lossless = True

    def accept_probabilities(
        self, proposal: Proposal, target_probs: Tensor, carry: Sequence[Any] | None = None
    ) -> Tensor:
        """Algorithm 4: p_remain / p_rej (equations 32 and 33), at most 1."""
        block = _modify(proposal, target_probs, carry)
        gamma = block.q.shape[1]
        difference = block.joint[:, 1:gamma, None] * block.rows[:, 1:gamma] - block.q[:, 1:]
        remain, rejected = difference.clamp(min=0).sum(-1), (-difference).clamp(min=0).sum(-1)
        h = torch.where(rejected <= 0, 1.0, remain / rejected)
        h = torch.cat((h, block.joint[:, gamma:]), 1) if gamma else block.joint[:, :0]
        places = torch.arange(1, gamma + 1, device=h.device)
        h = torch.where(places == proposal.lengths[:, None], block.joint[:, 1:], h)
        return torch.where(drafted(proposal), h.clamp(max=1), 0.0)

    def residual_weights(
        self,
        proposal: Proposal,
        target_probs: Tensor,
        num_accepted: Tensor,
        carry: Sequence[Any] | None = None,
    ) -> Tensor:
        """Equation (30): (p~_tau p - q)+, with the uncapped joint ratio of the kept tokens."""
        block = _modify(proposal, target_probs, carry)
        joint = block.joint.gather(1, num_accepted[:, None])
        p, q = row_at(block.rows, num_accepted), row_at(padded(block.q), num_accepted)
        kept_all = (num_accepted >= proposal.lengths)[:, None]
        return torch.where(kept_all, p, positive_or((joint * p - q).clamp(min=0), p))

    def count_accepted(self, passed: Tensor) -> Tensor:
        """The last success."""
        return last_success(passed)

    def next_carry(self, proposal: Proposal, target_probs: Tensor, verdict: Verdict) -> list[Any]:
        """Algorithm 5: move the levels on by what was emitted, and add this round's."""
        block = _modify(proposal, target_probs, verdict.carry)
        place, token = verdict.num_accepted, verdict.next_token[:, None]
        q = row_at(padded(block.q), place)
        log_ratios = block.log_ratios[torch.arange(len(place), device=place.device), place]
        remaining = block.counts - place[:, None]
        stages = _fold(row_at(target_probs, place), q, log_ratios, remaining)
        q_next = q.gather(1, token)
        steps = [(stage.gather(1, token) / q_next).log() for stage in stages]
        joint = block.joint.gather(1, place[:, None]).log()
        log_ratios = torch.cat(
            [log_ratios[:, [j]] + step for j, step in enumerate(steps[:-1])] + [joint + steps[-1]],
            dim=1,
        )
        counts = torch.cat((remaining, (proposal.lengths - place)[:, None]), 1) - 1
        # A ratio without bound (q had no such token) modifies nothing any more.
        counts = torch.where(log_ratios.isfinite(), counts.clamp(min=0), 0)
        log_ratios = log_ratios.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        return _compact(log_ratios, counts, max(block.counts.shape[1], block.q.shape[1] - 1))


def _modify(proposal: Proposal, target_probs: Tensor, carry: Sequence[Any] | None) -> _Block:
    """Apply the carried levels to the target's rows, along the drafted tokens."""
    q = proposal.dense(target_probs.shape[-1], target_probs.dtype)
    log_ratio, counts = _stack(carry, target_probs)
    joint = target_probs.new_ones(target_probs.shape[0])
    rows, joints, log_ratios = [], [joint], [log_ratio]
    q_drafted = of_drafted_tokens(q, proposal)
    for i in range(q.shape[1]):
        stages = _fold(target_probs[:, i], q[:, i], log_ratio, counts - i)
        step = [
            ratios(stage.gather(1, proposal.tokens[:, [i]])[:, 0], q_drafted[:, i])
            for stage in stages
        ]
        joint = (joint * step[-1]).clamp(max=MAX_RATIO)
        if len(step) > 1:
            log_steps = torch.stack(step[:-1], 1).log()
            log_ratio = (log_ratio + log_steps).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        rows.append(stages[-1])
        joints.append(joint)
        log_ratios.append(log_ratio)
    # The bonus row is never modified: with a fixed gamma no level reaches that far, and
    # behind a draft that max_new_tokens cut short nothing is emitted any more.
    rows.append(target_probs[:, -1])
    stacked = torch.stack(rows, 1)
    kept_as_is = torch.arange(stacked.shape[1], device=q.device) >= proposal.lengths[:, None]
    stacked = torch.where(kept_as_is[..., None], target_probs, stacked)
    return _Block(q, stacked, torch.stack(joints, 1), torch.stack(log_ratios, 1), counts)


def _fold(p: Tensor, q: Tensor, log_ratios: Tensor, remaining: Tensor) -> list[Tensor]:
    """Equation (31), level upon level: [T_0 = p, T_1, ..., T_J], each [B, V].

    A level with nothing `remaining` [B, J] leaves the row as it is.
    """
    stages = [p]
    for j in range(log_ratios.shape[1]):
        # (r p - q)+ normalised equals (p - q / r)+ normalised, which a large r cannot overflow.
        inverse = (-log_ratios[:, [j]]).exp()
        weights = positive_or((stages[-1] - inverse * q).clamp(min=0), stages[-1])
        modified = weights / weights.sum(-1, keepdim=True)
        stages.append(torch.where(remaining[:, [j]] > 0, modified, stages[-1]))
    return stages


def _stack(carry: Sequence[Any] | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """Carries of any depth as log ratios and counts [B, J], in the dtype of `like`."""
    batch = like.shape[0]
    carries = list(carry) if carry is not None else [None] * batch
    depth = max((len(c.counts) for c in carries if c is not None), default=0)
    log_ratios = like.new_zeros(batch, depth)
    counts = torch.zeros(batch, depth, dtype=torch.int64, device=like.device)
    for b, c in enumerate(carries):
        if c is not None:
            log_ratios[b, : len(c.counts)] = c.log_ratios
            counts[b, : len(c.counts)] = c.counts
    return log_ratios, counts


def _compact(log_ratios: Tensor, counts: Tensor, depth: int) -> list[Any]:
    """Drop used-up levels, keep the order, and split by sequence.

    At most gamma - 1 levels live at a time: each covers fewer positions than the last.
    """
    order = (counts <= 0).long().argsort(dim=1, stable=True)[:, :depth]
    log_ratios = log_ratios.gather(1, order)
    log_ratios = torch.where(counts.gather(1, order) > 0, log_ratios, 0.0)
    counts = counts.gather(1, order)
    return [GreedyBlockCarry(r, c) for r, c in zip(log_ratios, counts, strict=True)]

"""Greedy block verification (Sun et al., arXiv 2403.10444, Algorithms 4 to 6).

One round accepts as much as any coupling can. In exchange, the target's law has to be modified
for the rest of the block. Modifications nest, last for several rounds, and need q at each position
that they modify. So every draft of a request must have the same length (except where
max_new_tokens cuts it) and must go on past an end of text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tandem.speculation.proposal import Proposal
from tandem.verification.chain import (
    View,
    correction,
    last_success,
    of_drafted_tokens,
    residual_or,
    row_at,
    row_within,
)
from tandem.verification.kernels.greedy_block import decide_greedy_block
from tandem.verification.ratios import MAX_RATIO, ratios
from tandem.verification.verifier import Verifier

_MAX_LOG_RATIO = math.log(MAX_RATIO)


@dataclass(frozen=True)
class _GreedyView(View):
    """A view whose p are the target's rows after the modifications of all levels.

    Attributes:
        joint: [B, G+1], the uncapped joint ratio of each prefix of the draft.
        target: [B, G+1, V], the rows as the target gave them.
        log_ratios: [B, G+1, J], each level's log ratio after each prefix.
        counts: [B, J], positions each level still modified before this round.
    """

    joint: Tensor
    target: Tensor
    log_ratios: Tensor
    counts: Tensor


class GreedyBlockVerifier(Verifier[_GreedyView]):
    """Keeps each prefix with probability min(p, q) of the whole prefix, then corrects the law.

    Its carry is [2, J] float64: the modifications (levels) that still apply to a sequence, oldest
    first. Row 0 has their log ratios: ln of the joint p/q since the start of the block that made
    the level, where p is the target as modified by older levels. Row 1 has the number of coming
    positions that each still modifies; 0 for an unused level.
    """

    name = "greedy_block"
    lossless = True
    needs_every_draft = True
    fused = staticmethod(decide_greedy_block)

    def carry_from(self, levels: Sequence[tuple[float, int]], gamma: int) -> Tensor | None:
        """At most gamma - 1 levels, of finite ratios and counts below gamma."""
        if len(levels) >= max(gamma, 1):
            raise ValueError(f"holds {len(levels)} levels, gamma allows fewer")
        for log_ratio, count in levels:
            # Targets keep ratios within these bounds, which float32 can represent.
            if not abs(log_ratio) <= _MAX_LOG_RATIO + 1e-3 or not 1 <= count < gamma:
                raise ValueError(
                    f"log_ratio must be within {_MAX_LOG_RATIO:.1f} of 0 and count"
                    f" 1..{gamma - 1}, got {log_ratio} and {count}"
                )
        if not levels:
            return None
        return _padded(torch.tensor(levels, dtype=torch.float64).T, gamma - 1)

    def pack(self, carry: Sequence[Tensor | None], gamma: int) -> Tensor:
        """[B, 2J]: the log ratios, then the counts."""
        device = next((c.device for c in carry if c is not None), torch.device("cpu"))
        return _stack(carry, gamma - 1, device).flatten(1)

    def unpack(self, packed: Tensor) -> list[Tensor]:
        """The states as views of `packed`."""
        return list(packed.view(len(packed), 2, packed.shape[1] // 2))

    def levels_of(self, packed: Sequence[float]) -> list[tuple[float, int]]:
        """See `Verifier.levels_of`; unused levels are left out."""
        depth = len(packed) // 2
        pairs = zip(packed[:depth], packed[depth:], strict=True)
        return [(float(ratio), int(count)) for ratio, count in pairs if count > 0]

    def count_accepted(self, passed: Tensor) -> Tensor:
        """The last success."""
        return last_success(passed)

    def _view(
        self, proposal: Proposal, target_probs: Tensor, carry: Sequence[Any] | None
    ) -> _GreedyView:
        """Apply the carried levels to the target's rows, along the drafted tokens."""
        q = proposal.dense(target_probs.shape[-1], target_probs.dtype)
        q_drafted = of_drafted_tokens(q, proposal)
        carries = carry or [None] * len(target_probs)
        log_ratio, counts = _stack(carries, 0, target_probs.device).unbind(1)
        log_ratio, counts = log_ratio.to(target_probs.dtype), counts.long()
        joint = target_probs.new_ones(target_probs.shape[0])
        rows, joints, log_ratios, steps = [], [joint], [log_ratio], []
        for i in range(q.shape[1]):
            stages = _fold(target_probs[:, i], q[:, i], log_ratio, counts - i)
            token = proposal.tokens[:, i : i + 1]
            step = ratios(
                torch.cat([stage.gather(1, token) for stage in stages], 1),
                q_drafted[:, i : i + 1],
            )
            log_ratio = (log_ratio + step[:, :-1].log()).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
            joint = (joint * step[:, -1]).clamp(max=MAX_RATIO)
            rows.append(stages[-1])
            joints.append(joint)
            log_ratios.append(log_ratio)
            steps.append(step[:, -1])
        # The bonus row is never modified: with a fixed gamma no level reaches that far, and after
        # a draft that max_new_tokens cut short nothing more is emitted.
        rows.append(target_probs[:, -1])
        places = torch.arange(len(rows), device=q.device)
        behind = (places >= proposal.lengths[:, None])[..., None]
        return _GreedyView(
            proposal=proposal,
            p=torch.where(behind, target_probs, torch.stack(rows, 1)),
            q=q,
            ratios=torch.stack(steps, 1) if steps else q_drafted,
            joint=torch.stack(joints, 1),
            target=target_probs,
            log_ratios=torch.stack(log_ratios, 1),
            counts=counts,
        )

    def _accept(self, view: _GreedyView) -> Tensor:
        """Algorithm 4: p_remain / p_rej (equations 32 and 33), at most 1."""
        gamma = view.gamma
        difference = view.joint[:, 1:gamma, None] * view.p[:, 1:gamma] - view.q[:, 1:]
        remain, rejected = difference.clamp(min=0).sum(-1), (-difference).clamp(min=0).sum(-1)
        h = torch.where(rejected <= 0, 1.0, remain / rejected)
        h = torch.nn.functional.pad(h, (0, gamma - h.shape[1]))
        h = torch.where(view.ends, view.joint[:, 1:], h)
        return torch.where(view.drafted, h.clamp(max=1), 0.0)

    def _residual(self, view: _GreedyView, num_accepted: Tensor) -> Tensor:
        """Equation (30): (p~_tau p - q)+, with the uncapped joint ratio of the kept tokens."""
        joint = view.joint.gather(1, num_accepted[:, None])
        p, q = row_within(view.p, num_accepted), row_within(view.q, num_accepted)
        return correction((joint * p).sub_(q), p, view.kept_all(num_accepted))

    def _carry(self, view: _GreedyView, num_accepted: Tensor, next_token: Tensor) -> list[Any]:
        """Algorithm 5: advance the levels by the emitted tokens, and add this round's level."""
        token = next_token[:, None]
        q = row_at(view.q, num_accepted)
        log_ratios = row_at(view.log_ratios, num_accepted)
        remaining = view.counts - num_accepted[:, None]
        stages = _fold(row_at(view.target, num_accepted), q, log_ratios, remaining)
        step = torch.cat([stage.gather(1, token) for stage in stages], 1) / q.gather(1, token)
        joint = view.joint.gather(1, num_accepted[:, None])
        log_ratios = torch.cat((log_ratios, joint.log()), 1) + step.log()
        left = (view.proposal.lengths - num_accepted)[:, None]
        counts = torch.cat((remaining, left), 1) - 1
        # With an infinite ratio (q of the token is 0) a level modifies nothing any more.
        counts = torch.where(log_ratios.isfinite(), counts.clamp(min=0), 0)
        log_ratios = log_ratios.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        return _compact(log_ratios, counts, max(view.counts.shape[1], view.gamma - 1))


def _fold(p: Tensor, q: Tensor, log_ratios: Tensor, remaining: Tensor) -> list[Tensor]:
    """Equation (31), level by level: [T_0 = p, T_1, ..., T_J], each [B, V].

    A level whose `remaining` [B, J] is not positive leaves the row unchanged.
    """
    stages = [p]
    for j in range(log_ratios.shape[1]):
        # (r p - q)+ normalised equals (p - q / r)+ normalised, which a large r cannot overflow.
        inverse = (-log_ratios[:, j : j + 1]).exp()
        weights = residual_or(stages[-1] - inverse * q, stages[-1])
        modified = weights / weights.sum(-1, keepdim=True)
        stages.append(torch.where(remaining[:, j : j + 1] > 0, modified, stages[-1]))
    return stages


def _stack(carry: Sequence[Tensor | None], depth: int, device: torch.device) -> Tensor:
    """[B, 2, J], with as many levels as the deepest carry, and at least `depth`."""
    depth = max(depth, *(c.shape[1] for c in carry if c is not None), 0)
    unused = torch.zeros(2, depth, dtype=torch.float64, device=device)
    carries = [unused if c is None else _padded(c, depth) for c in carry]
    return torch.stack([c.to(device, non_blocking=True) for c in carries])


def _padded(carry: Tensor, depth: int) -> Tensor:
    """A carry padded with unused levels to `depth`."""
    missing = depth - carry.shape[1]
    return torch.nn.functional.pad(carry, (0, missing)) if missing else carry


def _compact(log_ratios: Tensor, counts: Tensor, depth: int) -> list[Any]:
    """Exactly `depth` levels: used-up ones go last, the others keep their order.

    A level lasts for fewer rounds than the longest draft so far has tokens, so at most that length
    minus one are in use. The depth never shrinks: after a draft that was cut at the end, levels of
    longer drafts are still in use.
    """
    missing = max(depth - counts.shape[1], 0)
    counts = torch.nn.functional.pad(counts, (0, missing))
    log_ratios = torch.nn.functional.pad(log_ratios, (0, missing))
    order = (counts <= 0).long().argsort(dim=1, stable=True)[:, :depth]
    counts = counts.gather(1, order)
    log_ratios = torch.where(counts > 0, log_ratios.gather(1, order), 0.0)
    return list(torch.stack((log_ratios.double(), counts.double()), 1))

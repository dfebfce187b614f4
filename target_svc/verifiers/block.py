"""Block verification (Sun et al., arXiv 2403.10444, Algorithm 2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tandem.speculation.proposal import Proposal
from target_svc.verifiers.verifier import (
    Verifier,
    drafted,
    last_success,
    of_drafted_tokens,
    padded,
    positive_or,
    ratios,
    row_at,
)


class BlockVerifier(Verifier):
    """The draft stands as a block: the last row that passes counts, not the first that fails.

    No valid rule accepts more in expectation, over any number of rounds (Theorem 2).
    """

    name = "block"
    lossless = True

    def accept_probabilities(
        self, proposal: Proposal, target_probs: Tensor, carry: Sequence[Any] | None = None
    ) -> Tensor:
        """Equation (5), in terms of the joint p_i of `_prefix_probabilities`."""
        q = proposal.dense(target_probs.shape[-1], target_probs.dtype)
        joint = _prefix_probabilities(proposal, target_probs, q)
        gamma = q.shape[1]
        # Row i - 1 of h decides on keeping i tokens: its residual is taken at row i.
        inner = joint[:, 1:gamma, None]
        residual = (inner * target_probs[:, 1:gamma] - q[:, 1:]).clamp(min=0).sum(-1)
        rejected = residual + (1 - inner[..., 0])
        h = torch.where(rejected <= 0, 1.0, residual / rejected)
        h = torch.cat((h, joint[:, gamma : gamma + 1]), 1) if gamma else joint[:, :0]
        places = torch.arange(1, gamma + 1, device=h.device)
        h = torch.where(places == proposal.lengths[:, None], joint[:, 1:], h)
        return torch.where(drafted(proposal), h, 0.0)

    def residual_weights(
        self,
        proposal: Proposal,
        target_probs: Tensor,
        num_accepted: Tensor,
        carry: Sequence[Any] | None = None,
    ) -> Tensor:
        """Equation (4): (p_tau p - q)+, with the joint p_tau of the kept tokens."""
        q = proposal.dense(target_probs.shape[-1], target_probs.dtype)
        joint = _prefix_probabilities(proposal, target_probs, q).gather(1, num_accepted[:, None])
        p = row_at(target_probs, num_accepted)
        q = row_at(padded(q), num_accepted)
        kept_all = (num_accepted >= proposal.lengths)[:, None]
        return torch.where(kept_all, p, positive_or((joint * p - q).clamp(min=0), p))

    def count_accepted(self, passed: Tensor) -> Tensor:
        """The last success."""
        return last_success(passed)


def _prefix_probabilities(proposal: Proposal, target_probs: Tensor, q: Tensor) -> Tensor:
    """p_0..p_G [B, G+1]: p_i = min(p_{i-1} p(X_i)/q(X_i), 1), the chance of keeping i or more."""
    step = ratios(of_drafted_tokens(target_probs[:, :-1], proposal), of_drafted_tokens(q, proposal))
    joint = [target_probs.new_ones(target_probs.shape[0])]
    for i in range(q.shape[1]):
        joint.append((joint[-1] * step[:, i]).clamp(max=1))
    return torch.stack(joint, 1)

"""Token verification (Leviathan et al., arXiv 2211.17192; Algorithm 1 of arXiv 2403.10444)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tandem.speculation.proposal import Proposal
from target_svc.verifiers.verifier import (
    Verifier,
    drafted,
    of_drafted_tokens,
    padded,
    positive_or,
    ratios,
    row_at,
    up_to_first_failure,
)


class TokenVerifier(Verifier):
    """Each token stands for itself: kept with probability min(p/q, 1), up to the first failure."""

    name = "token"
    lossless = True

    def accept_probabilities(
        self, proposal: Proposal, target_probs: Tensor, carry: Sequence[Any] | None = None
    ) -> Tensor:
        """h = min(p/q, 1)."""
        q = proposal.dense(target_probs.shape[-1], target_probs.dtype)
        p_drafted = of_drafted_tokens(target_probs[:, :-1], proposal)
        h = ratios(p_drafted, of_drafted_tokens(q, proposal)).clamp(max=1)
        return torch.where(drafted(proposal), h, 0.0)

    def residual_weights(
        self,
        proposal: Proposal,
        target_probs: Tensor,
        num_accepted: Tensor,
        carry: Sequence[Any] | None = None,
    ) -> Tensor:
        """Equation (3): (p - q)+ at the rejected row."""
        q = proposal.dense(target_probs.shape[-1], target_probs.dtype)
        p = row_at(target_probs, num_accepted)
        q = row_at(padded(q), num_accepted)
        kept_all = (num_accepted >= proposal.lengths)[:, None]
        return torch.where(kept_all, p, positive_or((p - q).clamp(min=0), p))

    def count_accepted(self, passed: Tensor) -> Tensor:
        """Up to the first failure."""
        return up_to_first_failure(passed)

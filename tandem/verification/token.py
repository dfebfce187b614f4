"""Token verification (Leviathan et al., arXiv 2211.17192; Algorithm 1 of arXiv 2403.10444)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from tandem.speculation.proposal import Proposal
from tandem.speculation.tree import DraftShape
from tandem.verification.chain import View, correction, plain_view, row_within, up_to_first_failure
from tandem.verification.kernels.chains import decide_token
from tandem.verification.kernels.trees import decide_token_tree
from tandem.verification.recursive import RecursiveRejection
from tandem.verification.tree import TreeRule
from tandem.verification.verifier import Verifier


class TokenVerifier(Verifier[View]):
    """Keeps each token with probability min(p/q, 1), up to the first that fails."""

    name = "token"
    lossless = True
    takes = DraftShape.TREE
    trees: ClassVar[TreeRule | None] = RecursiveRejection()
    fused = staticmethod(decide_token)
    fused_tree = staticmethod(decide_token_tree)

    def count_accepted(self, passed: Tensor) -> Tensor:
        """Up to the first failure."""
        return up_to_first_failure(passed)

    def _view(self, proposal: Proposal, target_probs: Tensor, carry: Sequence[Any] | None) -> View:
        return plain_view(proposal, target_probs)

    def _accept(self, view: View) -> Tensor:
        return torch.where(view.drafted, view.ratios.clamp(max=1), 0.0)

    def _residual(self, view: View, num_accepted: Tensor) -> Tensor:
        """Equation (3): (p - q)+ at the rejected row."""
        p, q = row_within(view.p, num_accepted), row_within(view.q, num_accepted)
        return correction(p - q, p, view.kept_all(num_accepted))

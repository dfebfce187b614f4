"""Block verification (Sun et al., arXiv 2403.10444, Algorithm 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tandem.speculation.proposal import Proposal
from tandem.speculation.tree import DraftShape
from tandem.verification.chain import View, correction, last_success, plain_view, row_within
from tandem.verification.kernels.chains import decide_block
from tandem.verification.kernels.trees import decide_block_tree
from tandem.verification.traversal import Traversal
from tandem.verification.tree import TreeRule
from tandem.verification.verifier import Verifier


@dataclass(frozen=True)
class _BlockView(View):
    """Adds the joint p_i: [B, G+1], the probability of keeping i tokens or more.

    p_0 = 1, p_i = min(p_{i-1} p(X_i)/q(X_i), 1).
    """

    joint: Tensor


class BlockVerifier(Verifier[_BlockView]):
    """Decides a draft as a block: the last row that passes counts, not the first that fails.

    No valid rule accepts more in expectation, over any number of rounds (Theorem 2).
    """

    name = "block"
    lossless = True
    takes = DraftShape.TREE
    trees: ClassVar[TreeRule | None] = Traversal()
    fused = staticmethod(decide_block)
    fused_tree = staticmethod(decide_block_tree)

    def count_accepted(self, passed: Tensor) -> Tensor:
        """The last success."""
        return last_success(passed)

    def _view(
        self, proposal: Proposal, target_probs: Tensor, carry: Sequence[Any] | None
    ) -> _BlockView:
        view = plain_view(proposal, target_probs)
        joint = [view.p.new_ones(view.p.shape[0])]
        for step in view.ratios.unbind(1):
            joint.append((joint[-1] * step).clamp(max=1))
        return _BlockView(proposal, view.p, view.q, view.ratios, torch.stack(joint, 1))

    def _accept(self, view: _BlockView) -> Tensor:
        """Equation (5); row i - 1 decides on keeping i tokens, whose residual is at row i."""
        gamma = view.gamma
        joint = view.joint[:, 1:gamma]
        residual = (joint[..., None] * view.p[:, 1:gamma]).sub_(view.q[:, 1:]).clamp_(min=0).sum(-1)
        rejected = residual + (1 - joint)
        h = torch.where(rejected <= 0, 1.0, residual / rejected)
        h = torch.nn.functional.pad(h, (0, gamma - h.shape[1]))
        h = torch.where(view.ends, view.joint[:, 1:], h)
        return torch.where(view.drafted, h, 0.0)

    def _residual(self, view: _BlockView, num_accepted: Tensor) -> Tensor:
        """Equation (4): (p_tau p - q)+, with the joint p_tau of the kept tokens."""
        joint = view.joint.gather(1, num_accepted[:, None])
        p, q = row_within(view.p, num_accepted), row_within(view.q, num_accepted)
        return correction((joint * p).sub_(q), p, view.kept_all(num_accepted))

"""SpecTr's k-SEQ (Sun et al., arXiv 2310.15141, Algorithm 2) on merged independent chains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tandem.speculation.proposal import Proposal
from tandem.speculation.tree import DraftShape
from tandem.speculation.tree_batch import TreeBatch
from tandem.verification.kernels.chains import decide_token
from tandem.verification.kernels.trees import decide_spectr
from tandem.verification.ratios import ratios
from tandem.verification.token import TokenVerifier
from tandem.verification.tree import TreeNodes, TreeRule, first_passed_child

# Halvings of [1, k]: more would gain nothing, as float32 has 24 bits.
_HALVINGS = 30
# So that rounding of a float32 sum cannot make an infeasible factor look feasible.
_MARGIN = 1 + 64 * torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class SpectrJudged:
    """A batch of trees, with the factor ρ of each place.

    Attributes:
        nodes: the batch.
        rho: [B, N+1]; 1 at places without children.
    """

    nodes: TreeNodes
    rho: Tensor

    @classmethod
    def of(cls, proposal: Proposal, target_probs: Tensor) -> SpectrJudged:
        """Find all factors at once, in the entries of q's rows: elsewhere min(p / ρ, q) is 0."""
        nodes = TreeNodes.of(proposal, target_probs)
        tree, rho = nodes.tree, nodes.p.new_ones(nodes.p.shape[:2])
        if not tree.levels:
            return cls(nodes, rho)
        batch = torch.cat([level[0].batch for level in tree.levels])
        node = torch.cat([level[0].node for level in tree.levels])
        place, row = tree.parents[batch, node], nodes.branches.row_of[batch, node]
        ids, q = proposal.ids[batch, row], proposal.probs[batch, row].to(rho.dtype)
        p = nodes.p[batch[:, None], place[:, None], ids]
        rho[batch, place] = factor(p, q, (tree.children[batch, place] >= 0).sum(-1))
        return cls(nodes, rho)

    def accept(self) -> Tensor:
        """h = min(1, p(x) / (ρ q(x))) of each draw."""
        nodes, tree = self.nodes, self.nodes.tree
        each = torch.arange(len(nodes.tokens), device=nodes.p.device)[:, None]
        p = nodes.p[each, tree.parents, nodes.tokens]
        q = nodes.rows[each, nodes.branches.row_of, nodes.tokens]
        h = (ratios(p, q) / self.rho.gather(1, tree.parents)).clamp(max=1)
        return torch.where(tree.order < tree.order.shape[1], h, 0.0)

    def residual(self, place: Tensor) -> Tensor:
        """p - min(p / ρ, q) (1 - (1 - β)^k) / β, where k is the number of draws at the place."""
        nodes = self.nodes
        p = nodes.p_at(place)
        each = torch.arange(len(place), device=place.device)
        draws = (nodes.tree.children[each, place] >= 0).sum(-1, keepdim=True)
        rho = self.rho.gather(1, place[:, None])
        if not nodes.tree.children.shape[2]:
            return p
        common = torch.minimum(p / rho, nodes.q_of_child(place, 0))
        beta = common.sum(-1, keepdim=True)
        weights = (p - common * _accepted(beta, draws) / beta.clamp(min=1e-30)).clamp_(min=0)
        usable = (draws > 0) & (weights.sum(-1, keepdim=True) > 0)
        return torch.where(usable, weights, p)

    def carry(self, place: Tensor, next_token: Tensor) -> list[Any]:
        return [None] * len(place)


def factor(p: Tensor, q: Tensor, draws: Tensor) -> Tensor:
    """[n]: the least ρ in [1, k] at which k draws accept no more than ρ β, rounded up.

    A smaller ρ would make the residual negative and the text wrong; a larger one accepts less.

    Args:
        p: [n, K], at the entries of q.
        q: [n, K], the row that all draws at a place come from.
        draws: [n] int64, the number k of draws at each place.
    """
    low, high = torch.ones_like(p[:, 0]), draws.to(p.dtype)
    for _ in range(_HALVINGS):
        rho = (low + high) / 2
        beta = torch.minimum(p / rho[:, None], q).sum(-1)
        feasible = _accepted(beta, draws) * _MARGIN <= rho * beta
        low, high = torch.where(feasible, low, rho), torch.where(feasible, rho, high)
    return high


def _accepted(beta: Tensor, draws: Tensor) -> Tensor:
    """1 - (1 - β)^k, for β in [0, 1]."""
    return -torch.expm1(draws * torch.log1p(-beta.clamp(max=1)))


class KSeq(TreeRule):
    """Follows, from the root on, the first draw that passed, until none did."""

    def judge(self, proposal: Proposal, target_probs: Tensor) -> SpectrJudged:
        return SpectrJudged.of(proposal, target_probs)

    def stop(self, tree: TreeBatch, passed: Tensor) -> Tensor:
        return first_passed_child(tree, passed)


class SpecTrVerifier(TokenVerifier):
    """At each place, tries the k draws in order, each with probability min(1, p / (ρ q)).

    The first that passes is kept. Takes independent chains, merged: a repeated draw is a node too.
    A single chain is decided as by `token`, which is k-SEQ with k = 1.
    """

    name = "spectr"
    takes = DraftShape.IID_CHAINS
    fused = staticmethod(decide_token)
    fused_tree = staticmethod(decide_spectr)
    trees: ClassVar[TreeRule | None] = KSeq()

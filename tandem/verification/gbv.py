"""Block verification of the best of several independent chains (GBV, multi-path)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tandem.speculation.proposal import Proposal
from tandem.speculation.tree import DraftShape
from tandem.speculation.tree_batch import TreeBatch
from tandem.verification.block import BlockVerifier
from tandem.verification.kernels.chains import decide_block
from tandem.verification.kernels.trees import decide_gbv
from tandem.verification.ratios import ratios
from tandem.verification.tree import TreeNodes, TreeRule, excess_or


@dataclass(frozen=True)
class GbvJudged:
    """One path of each tree, and Algorithm 2 of arXiv 2403.10444 along it.

    Attributes:
        nodes: the batch.
        h: [B, N]; 0 off the path.
        joint: [B, N+1], the probability ω with which a path up to a place is kept.
        rows: [B, D, V], at each depth the law of the path's next token.
    """

    nodes: TreeNodes
    h: Tensor
    joint: Tensor
    rows: Tensor

    @classmethod
    def of(cls, nodes: TreeNodes) -> GbvJudged:
        """Follow, from the root on, the child with the largest p / q, while there are children."""
        batch = len(nodes.tokens)
        each = torch.arange(batch, device=nodes.p.device)
        place = torch.zeros(batch, dtype=torch.int64, device=nodes.p.device)
        h = nodes.p.new_zeros(nodes.tokens.shape)
        joint = nodes.p.new_ones(nodes.p.shape[:2])
        rows = []
        last = place  # the previous node, which is judged when the path goes on from its place
        for depth in range(nodes.tree.paths):
            p, omega = nodes.p_at(place), joint[each, place]
            children = nodes.tree.children[each, place]
            there = children >= 0
            on = there.any(1)
            row, chosen = best_of(p, nodes.q_of_child(place, 0), _tokens(nodes, children), there)
            rows.append(row)
            if depth:
                mass = (omega[:, None] * p).sub_(row).clamp_(min=0).sum(-1)
                rejected = mass + (1 - omega)
                h_last = torch.where(rejected <= 0, 1.0, mass / rejected)
                h[each, last] = torch.where(on, h_last, h[each, last])
            node = children.gather(1, chosen[:, None])[:, 0].clamp(min=0)
            token = nodes.tokens[each, node][:, None]
            step = ratios(p.gather(1, token), row.gather(1, token))[:, 0]
            arrived = (omega * step).clamp(max=1)
            behind = nodes.tree.home[each, node]
            joint[each, behind] = torch.where(on, arrived, joint[each, behind])
            h[each, node] = torch.where(on, arrived, h[each, node])
            place, last = torch.where(on, behind, place), torch.where(on, node, last)
        return cls(nodes, h, joint, torch.stack(rows, 1) if rows else nodes.rows)

    def accept(self) -> Tensor:
        """On the path h = S / (S + 1 - ω), S = Σ (ω p - row)+; at its end h = ω."""
        there = self.nodes.tree.order < self.nodes.tree.order.shape[1]
        return torch.where(there, self.h, 0.0)

    def residual(self, place: Tensor) -> Tensor:
        """(ω p - row)+, or p at a place without children."""
        nodes = self.nodes
        p = nodes.p_at(place)
        if not nodes.tree.paths:
            return p
        each = torch.arange(len(place), device=place.device)
        depth = nodes.tree.depth[each, place].clamp(max=nodes.tree.paths - 1)
        omega = self.joint[each, place][:, None]
        law, _ = excess_or((omega * p).sub_(self.rows[each, depth]), p)
        inner = (nodes.tree.children[each, place] >= 0).any(1, keepdim=True)
        return torch.where(inner, law, p)

    def carry(self, place: Tensor, next_token: Tensor) -> list[Any]:
        return [None] * len(place)


def _tokens(nodes: TreeNodes, children: Tensor) -> Tensor:
    """[B, C] the children's tokens; arbitrary for missing children."""
    return nodes.tokens.gather(1, children.clamp(min=0))


def best_of(p: Tensor, q: Tensor, tokens: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
    """The law of the draw with the largest p / q among K draws from q, and the index of that draw.

    A token is that draw with probability c^K - b^K, where b is q's mass of tokens ranked below it,
    and c = b + q. It is computed as the sum q Σ_j c^j b^(K-1-j), in which nothing cancels.

    Args:
        p: [B, V].
        q: [B, V].
        tokens: [B, C], the draws.
        there: [B, C], which draws exist.

    Returns:
        [B, V] the law, and [B] the index of the draw.
    """
    order = ratios(p, q).argsort(dim=-1, stable=True)
    places = torch.arange(order.shape[1], device=order.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, places)
    upto = q.gather(1, order).cumsum(-1)
    below = torch.nn.functional.pad(upto[:, :-1], (1, 0))
    count = there.sum(1, keepdim=True)
    total, power = torch.ones_like(q), torch.ones_like(q)
    for draws in range(1, there.shape[1]):
        power = power * upto
        total = torch.where(draws < count, total * below + power, total)
    row = q * total.gather(1, rank)
    row = row / row.sum(-1, keepdim=True).clamp(min=1e-30)
    chosen = torch.where(there, rank.gather(1, tokens), -1).argmax(1)
    return row, chosen


class BestPath(TreeRule):
    """Keeps up to the deepest node that passed; only nodes of one path can pass."""

    def judge(self, proposal: Proposal, target_probs: Tensor) -> GbvJudged:
        return GbvJudged.of(TreeNodes.of(proposal, target_probs))

    def stop(self, tree: TreeBatch, passed: Tensor) -> Tensor:
        depth = tree.depth[:, 1:] * passed
        deepest, node = torch.nn.functional.pad(depth, (0, 1)).max(1)
        home = torch.nn.functional.pad(tree.home, (0, 1)).gather(1, node[:, None])[:, 0]
        return torch.where(deepest > 0, home, 0)


class GbvVerifier(BlockVerifier):
    """Picks one of several chains by the target's own rows, and decides it as a block.

    Takes independent chains, merged. The picked path does not follow the drafter's law, but its law
    is known, so that block verification is exact for it. From four chains on it keeps fewer tokens
    than `block` on the same tree. A single chain is decided as by `block`.
    """

    name = "gbv"
    takes = DraftShape.IID_CHAINS
    fused = staticmethod(decide_block)
    fused_tree = staticmethod(decide_gbv)
    trees: ClassVar[TreeRule | None] = BestPath()

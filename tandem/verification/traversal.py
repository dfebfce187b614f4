"""Traversal: block verification on trees.

A path is decided as a block: nodes are judged from the leaves up, each with the probability that
its whole path is kept, less what its children took before.
(Traversal verification, arXiv 2505.12398; on a chain Algorithm 2 of arXiv 2403.10444.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tandem.speculation.proposal import Proposal
from tandem.speculation.tree_batch import TreeBatch
from tandem.verification.ratios import ratios
from tandem.verification.tree import TreeNodes, TreeRule, excess_or, first_in_post_order


@dataclass(frozen=True)
class TraversalJudged:
    """A batch of trees. The state of a place is its probability ω and its law M.

    Attributes:
        nodes: the batch.
        arrived: [B, N+1], ω of each place before its children; 1 at the root.
        after: [B, N+1], ω after its last child.
    """

    nodes: TreeNodes
    arrived: Tensor
    after: Tensor

    @classmethod
    def of(cls, nodes: TreeNodes) -> TraversalJudged:
        """ω(root) = 1; a child arrives with min(1, ω M(x) / q(x)), and leaves its parent with
        ω = S / (S + 1 - ω) and M = norm((ω M - q)+), where S = Σ (ω M - q)+."""
        arrived = nodes.p.new_ones(nodes.p.shape[:2])
        after = nodes.p.new_ones(nodes.p.shape[:2])
        for level in nodes.tree.levels:
            chance = law = nodes.p.new_zeros(0)
            for rank, siblings in enumerate(level):
                batch, place = siblings.batch, siblings.place
                p = nodes.p[batch, place]
                law = law[siblings.before] if rank else p
                chance = chance[siblings.before] if rank else arrived[batch, place]
                q, token = nodes.q(siblings), nodes.token(siblings)
                ratio = ratios(law.gather(1, token), q.gather(1, token))[:, 0]
                arrived[batch, siblings.node + 1] = (chance * ratio).clamp(max=1)
                after[batch, siblings.node + 1] = arrived[batch, siblings.node + 1]
                law, chance = _without(law, chance, q, p)
                after[batch, place] = chance
        return cls(nodes, arrived, after)

    def accept(self) -> Tensor:
        """h = ω after the last child."""
        there = self.nodes.tree.order < self.nodes.tree.order.shape[1]
        return torch.where(there, self.after[:, 1:], 0.0)

    def residual(self, place: Tensor) -> Tensor:
        """M after the last child."""
        nodes = self.nodes
        p = law = nodes.p_at(place)
        chance = self.arrived.gather(1, place[:, None])[:, 0]
        for rank in range(nodes.tree.children.shape[2]):
            _, there = nodes.child(place, rank)
            law_after, chance_after = _without(law, chance, nodes.q_of_child(place, rank), p)
            law = torch.where(there[:, None], law_after, law)
            chance = torch.where(there, chance_after, chance)
        return law

    def carry(self, place: Tensor, next_token: Tensor) -> list[Any]:
        return [None] * len(place)


def _without(law: Tensor, chance: Tensor, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """A place's state after a child that was drawn from q [n, V] was rejected."""
    law, mass = excess_or((chance[:, None] * law).sub_(q), p)
    rejected = mass + (1 - chance)
    return law, torch.where(rejected <= 0, 1.0, mass / rejected)


class Traversal(TreeRule):
    """Keeps up to the first node that passed, where children come before their parents."""

    def judge(self, proposal: Proposal, target_probs: Tensor) -> TraversalJudged:
        return TraversalJudged.of(TreeNodes.of(proposal, target_probs))

    def stop(self, tree: TreeBatch, passed: Tensor) -> Tensor:
        return first_in_post_order(tree, passed)

"""Recursive rejection: token verification on trees.

The children of a place are tried in the order in which they were drawn, each against what the
earlier ones left of the target's row. (SpecInfer's multi-step sampling, arXiv 2305.09781; for
children drawn without replacement Sequoia's, arXiv 2402.12374.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tandem.speculation.proposal import Proposal
from tandem.speculation.tree_batch import TreeBatch
from tandem.verification.ratios import ratios
from tandem.verification.tree import TreeNodes, TreeRule, excess_or, first_passed_child


@dataclass(frozen=True)
class RecursiveJudged:
    nodes: TreeNodes

    def accept(self) -> Tensor:
        """h = min(1, M(x) / q(x)), with M = p, then norm((M - q)+) after each child."""
        nodes = self.nodes
        h = nodes.p.new_zeros(nodes.tokens.shape)
        for level in nodes.tree.levels:
            law = nodes.p.new_zeros(0)
            for rank, siblings in enumerate(level):
                p = nodes.p[siblings.batch, siblings.place]
                law = law[siblings.before] if rank else p
                q, token = nodes.q(siblings), nodes.token(siblings)
                ratio = ratios(law.gather(1, token), q.gather(1, token))
                h[siblings.batch, siblings.node] = ratio.clamp(max=1)[:, 0]
                law, _ = excess_or(law - q, p)
        return h

    def residual(self, place: Tensor) -> Tensor:
        """What the children of the place left of its row."""
        nodes = self.nodes
        p = law = nodes.p_at(place)
        for rank in range(nodes.tree.children.shape[2]):
            _, there = nodes.child(place, rank)
            after, _ = excess_or(law - nodes.q_of_child(place, rank), p)
            law = torch.where(there[:, None], after, law)
        return law

    def carry(self, place: Tensor, next_token: Tensor) -> list[Any]:
        return [None] * len(place)


class RecursiveRejection(TreeRule):
    """Follows, from the root on, the first child that passed, until none did."""

    def judge(self, proposal: Proposal, target_probs: Tensor) -> RecursiveJudged:
        return RecursiveJudged(TreeNodes.of(proposal, target_probs))

    def stop(self, tree: TreeBatch, passed: Tensor) -> Tensor:
        return first_passed_child(tree, passed)
